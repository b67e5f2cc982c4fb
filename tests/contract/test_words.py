"""Docstrings and comments are plain technical English: none has a wording that is hard to read."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("services/tasuki", "client/tasuki", "protos/tasuki/wire")
_UNCLEAR = re.compile(r"\banew\b|(?<!instead )\bof its own\b|\bby hand\b|\bails\b|\bmeets what\b", re.IGNORECASE)
_OPENING = re.compile(r"(?:What|That) ")


def test_docstrings_and_comments_have_no_unclear_wording() -> None:
    paths = [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
    found = [f"{path.relative_to(_ROOT)}:{finding}" for path in paths for finding in _findings(path)]
    assert len(paths) > 200
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What a rank holds."""\n',
        'class A:\n    a: int\n    """That the samples have."""\n',
        "# made\n# anew\n",
        'def f() -> None:\n    """Gives a rank a copy of\n    its own."""\n',
    ],
)
def test_unclear_wording_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    assert len(list(_findings(path))) == 1


def _findings(path: Path) -> Iterator[str]:
    for line, text in _docstrings(path):
        if _OPENING.match(text):
            yield f"{line}: a docstring opens with {text.split()[0]!r}; begin with a verb or a noun phrase"
        yield from _unclear(line, text)
    for line, text in _comments(path):
        yield from _unclear(line, text)


def _unclear(line: int, text: str) -> Iterator[str]:
    for match in _UNCLEAR.finditer(" ".join(text.split())):
        yield f"{line}: rewrite the sentence with {match.group()!r}"


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string that is a statement: those of modules, classes and functions, and those behind fields."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case _:
                pass


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.removeprefix("#")
