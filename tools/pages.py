"""Checks the pages: links lead somewhere, commands parse, generated parts are current, shipped configurations load.

Usage: python -m tools.pages [--renew], which writes the generated parts.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from tasuki.cli.arguments import make_parser
from tasuki.config.load import load_config
from tasuki.rpc.metrics import ALL
from tools import api_page, config_page, error_pages, grafana_dashboard, knobs_table

_ROOT = Path(__file__).parents[1]
_PAGES = [*(_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((_ROOT / "docs").rglob("*.md"))]
_PAGES += sorted((_ROOT / "client/examples").glob("*/README.md"))
_CONFIGS = [*sorted((_ROOT / "deploy/config").glob("*.toml")), *sorted((_ROOT / "client/examples").glob("*/*.toml"))]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_ROWS_OF_METRICS = re.compile(r"(^\| `tasuki_.*\n)+", re.MULTILINE)


def _metrics_page(text: str) -> str:
    rows = (f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.text} |\n" for one in ALL)
    return _ROWS_OF_METRICS.sub("".join(rows), text)


def _linked(page: str) -> str:
    """Makes links of the pages that docstrings name."""
    return re.sub(r"\bdocs/(\w+)/([\w-]+\.md)", r"[\2](../\1/\2)", page)


_GENERATED: dict[str, Callable[[str], str]] = {
    "docs/reference/api.md": lambda _: _linked(api_page.page()),
    "docs/reference/config.md": lambda _: _linked(config_page.page()),
    "docs/reference/errors.md": error_pages.page,
    "docs/reference/metrics.md": _metrics_page,
    "docs/reference/trainer.md": knobs_table.trainer_page,
    "deploy/grafana/tasuki.json": lambda _: json.dumps(grafana_dashboard.dashboard(), indent=1) + "\n",
}
"""Files that are generated in whole or in part: present text to current text."""


def _anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def _broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            yield f"{link} leads nowhere"


def _wrong_commands(page: Path) -> Iterator[str]:
    makefile = (_ROOT / "Makefile").read_text()
    for language, block in _BLOCK.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines() if language in ("sh", "bash", "text") else ()
        if language == "console":
            lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ tasuki ")]
        for words in filter(None, (shlex.split(line, comments=True) for line in lines)):
            if words[0] == "make" and not re.search(rf"^{words[1]}:", makefile, re.MULTILINE):
                yield f"make has no target {words[1]}"
            elif words[0].endswith("python"):
                program = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
                if not (_ROOT / program).is_file():
                    yield f"{program} is not there"
            elif "tasuki" in words and (words[0] in ("tasuki", "docker", "ssh") or "=" in words[0]):
                arguments = words[words.index("tasuki") + 1 :]
                told = StringIO()
                try:
                    with redirect_stderr(told):
                        make_parser().parse_args(arguments)
                except SystemExit:
                    yield f"tasuki {shlex.join(arguments)}: {told.getvalue().splitlines()[-1]}"


def _problems() -> Iterator[str]:
    for page in _PAGES:
        for problem in (*_broken_links(page), *_wrong_commands(page)):
            yield f"{page.relative_to(_ROOT)}: {problem}"
    for name, current in _GENERATED.items():
        text = (_ROOT / name).read_text()
        if current(text) != text:
            yield f"{name} is not current: run `python -m tools.pages --renew`"
    for name in api_page.undocumented():
        yield f"docs/reference/api.md: {name} has no docstring"
    for config in _CONFIGS:
        try:
            load_config(config)
        except Exception as error:  # noqa: BLE001
            yield f"{config.relative_to(_ROOT)}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write the generated parts")
    if parser.parse_args().renew:
        for name, current in _GENERATED.items():
            file = _ROOT / name
            file.write_text(current(file.read_text()))
    problems = list(_problems())
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
