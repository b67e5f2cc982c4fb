"""Commands of README.md and docs/ exist and take the given arguments."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.cli.__main__ import _parser

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")))]
PAGES += ["client/examples/arithmetic/README.md"]
MAKEFILE = (ROOT / "Makefile").read_text()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each line of the shell blocks, with continued lines joined."""
    for page in PAGES:
        for block in re.findall(r"^ *```(?:sh|text|bash)\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield page, words


def named(page: str, words: list[str]) -> str:
    return f"{page}: {' '.join(words)}"


TASUKI = [
    (page, words[words.index("tasuki") + 1 :])
    for page, words in commands()
    if (words[0] in ("tasuki", "docker", "ssh") or "=" in words[0]) and "tasuki" in words
]
MAKE = [(page, words[1:]) for page, words in commands() if words[0] == "make"]
SCRIPTS = [(page, words) for page, words in commands() if words[0].endswith("python")]


@pytest.mark.parametrize(("page", "arguments"), TASUKI, ids=[named(*one) for one in TASUKI])
def test_arguments_are_those_that_tasuki_takes(page: str, arguments: list[str]) -> None:
    _parser().parse_args(arguments)


@pytest.mark.parametrize(("page", "arguments"), MAKE, ids=[named(*one) for one in MAKE])
def test_make_has_the_target_and_reads_the_variable(page: str, arguments: list[str]) -> None:
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        assert f"$({name})" in MAKEFILE if is_variable else re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), argument


@pytest.mark.parametrize(("page", "words"), SCRIPTS, ids=[named(*one) for one in SCRIPTS])
def test_a_python_program_is_there(page: str, words: list[str]) -> None:
    program = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
    assert (ROOT / program).is_file()


def test_extras_that_pages_install_are_those_of_the_project() -> None:
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    named = {extra for extras in re.findall(r"'\.\[([\w,]+)\]'", pages) for extra in extras.split(",")}
    assert "otel" in named
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_commands_are_found() -> None:
    assert len(TASUKI) > 20 and len(MAKE) > 5 and len(SCRIPTS) >= 3


def test_make_says_what_it_installs_before_it_is_silent() -> None:
    argv = ["make", "-n", "-W", "pyproject.toml", ".venv/.synced"]
    planned = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    told, installed = planned.index("11 GB"), planned.index("uv sync")
    assert told < installed and "11 GB" in (ROOT / "README.md").read_text()
