"""Docstrings, comments and documents are plain technical English, without wordings that are hard to read."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PRODUCT = ("services/tasuki", "client", "protos/tasuki/wire")
_DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "protos/tasuki/v1/*.proto",
    "csrc/**/*.h",
    "csrc/**/*.cpp",
)
_IN_DOCUMENTS = re.compile(r"\banew\b|\bstands\b|\bby hand\b|\bails\b|\bmeets what\b|\bthat which\b", re.IGNORECASE)
_IN_CODE = re.compile(rf"{_IN_DOCUMENTS.pattern}|(?<!instead )\bof its own\b", re.IGNORECASE)
_NAMES = re.compile(r"(?:^|_)(?:anew|stands|by_hand|let_go|withhold|withheld)(?:_|$)")
_OPENING = re.compile(r"(?:Also|As|By|Has|Its|Of|Ours|So|Such|That|Theirs|Those|What|Which|Who|Whose)\b")


@pytest.mark.parametrize("folders", [_PRODUCT, ("tests", "tools")], ids="-".join)
def test_docstrings_and_comments_have_no_unclear_wording(folders: tuple[str, ...]) -> None:
    paths = _python(*folders)
    found = [f"{path.relative_to(_ROOT)}:{finding}" for path in paths for finding in _code_findings(path)]
    assert len(paths) > 200
    assert not found, "\n".join(found)


def test_tests_and_tools_have_no_unclear_names() -> None:
    paths = _python("tests", "tools")
    found = [f"{path.relative_to(_ROOT)}:{finding}" for path in paths for finding in _name_findings(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("pattern", _DOCUMENTS)
def test_documents_protos_and_native_code_have_no_unclear_wording(pattern: str) -> None:
    paths = list(_ROOT.glob(pattern))
    found = [f"{path.relative_to(_ROOT)}:{finding}" for path in paths for finding in _document_findings(path)]
    assert paths
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What a rank holds."""\n',
        '"""Who holds the GPUs."""\n',
        'class A:\n    a: int\n    """That the samples have."""\n',
        'a = 1\n"""Of a sample."""\n',
        "# made\n# anew\n",
        "# where a node stands\n",
        'def f() -> None:\n    """Gives a rank a copy of\n    its own."""\n',
    ],
)
def test_unclear_wording_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    assert len(list(_code_findings(path))) == 1


def test_unclear_names_and_wording_of_documents_are_found(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text("def test_a_stage_by_hand() -> None: ...\n")
    assert list(_name_findings(tmp_path / "test.py")) == ["1: rename test_a_stage_by_hand"]
    (tmp_path / "page.md").write_text("Files are written\nby\nhand.\n")
    assert list(_document_findings(tmp_path / "page.md")) == ["2: rewrite the sentence with 'by hand'"]


def _python(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py")))
    return [path for path in paths if "_pb2" not in path.name and "node_modules" not in path.parts]


def _code_findings(path: Path) -> Iterator[str]:
    for line, text in _docstrings(path):
        if _OPENING.match(text):
            yield f"{line}: a docstring opens with {text.split()[0]!r}; begin with a verb or a noun phrase"
    for line, text in (*_docstrings(path), *_comments(path)):
        for match in _IN_CODE.finditer(" ".join(text.split())):
            yield f"{line}: rewrite the sentence with {match.group()!r}"


def _name_findings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _NAMES.search(node.name):
            yield f"{node.lineno}: rename {node.name}"


def _document_findings(path: Path) -> Iterator[str]:
    text = re.sub(r"\s", " ", path.read_text())
    for match in _IN_DOCUMENTS.finditer(text):
        yield f"{path.read_text()[: match.start()].count(chr(10)) + 1}: rewrite the sentence with {match.group()!r}"


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every string statement: docstrings of modules, classes and functions, and strings below fields."""
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
