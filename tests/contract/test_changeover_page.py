"""docs/changeover.md names files and functions that exist. `make chaos` checks that a changeover passes them."""

from __future__ import annotations

import ast

from tests.changeover_page import ROOT, written_counts, written_paths


def test_the_files_of_the_path_have_its_functions() -> None:
    for file, function in {each for path in written_paths().values() for each in path}:
        tree = ast.parse((ROOT / "services" / "tasuki" / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            file
        )


def test_the_counts_are_those_of_the_table() -> None:
    """The counts include the interceptor above the table with its two functions, and a function nested in the trainer's Pause."""
    within = {"OFFLOAD": 1, "PAUSE_KV": 0}
    assert written_counts() == {
        stage: (len({file for file, _ in path}) + 1, len(path) + 2 + within[stage]) for stage, path in written_paths().items()
    }
