"""Files and functions in docs/changeover.md are those that a changeover of a node passes. `make chaos` and `.ci/run`."""

from __future__ import annotations

import pytest

from tests.changeover_page import written_counts, written_paths
from tools.bench.changeover_path import files_of, measured_paths

_INTERCEPTORS = "rpc/interceptors.py"
"""File that the page names above its table: every call enters a server there."""


@pytest.mark.timeout(600)
def test_the_page_has_the_functions_that_a_changeover_passes() -> None:
    measured = measured_paths()
    assert {stage: _table(functions) for stage, functions in measured.items()} == written_paths()
    assert {stage: (len(files_of(functions)), len(functions)) for stage, functions in measured.items()} == written_counts()


def _table(functions: list[str]) -> list[tuple[str, str]]:
    """Rows in the form of the table: a nested function counts as the outer one, and each function once."""
    rows = [
        (file, name.partition(".<locals>")[0].rpartition(".")[2]) for file, _, name in (one.partition(":") for one in functions)
    ]
    return list(dict.fromkeys(row for row in rows if row[0] != _INTERCEPTORS))
