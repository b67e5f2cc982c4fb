"""Benchmarks and GPU tests import existing names: without a GPU none of them runs, and Pyright does not check names in tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = [ROOT / "protos", ROOT / "services", ROOT / "client", ROOT]
FILES = sorted([*(ROOT / "tools/bench").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")])


def source_of(module: str) -> Path | None:
    """Returns the module's file; None for a generated or third-party module."""
    for root in ROOTS:
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def bound_names(statements: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case _:
                names |= {
                    node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
                for block in ("body", "orelse", "handlers"):
                    names |= bound_names([one for one in getattr(statement, block, []) if isinstance(one, ast.stmt)])
    return names


@cache
def names_of(file: Path) -> set[str]:
    return bound_names(ast.parse(file.read_text()).body)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_imported_name_of_ours_exists(file: Path) -> None:
    missing: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ("tasuki", "tests", "tools"):
            continue
        source = source_of(node.module)
        if source is None or source.stem.endswith("_pb2"):
            continue
        for alias in node.names:
            if alias.name not in names_of(source) and source_of(f"{node.module}.{alias.name}") is None:
                missing.append(f"{node.module}.{alias.name} in line {node.lineno}")
    assert not missing
