"""Reference pages are complete: docs/grpc.md on errors and calls, docs/config.md on settings, docs/models.md on families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.models.families import FAMILIES
from tasuki.rpc.methods import METHODS
from tools import config_page

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "grpc.md").read_text()


@pytest.mark.parametrize("method", [method.name for method in METHODS.values()])
def test_page_has_a_line_that_calls(method: str) -> None:
    assert any(line.startswith("grpcurl ") and method in line.split() for line in PAGE.splitlines())


def test_models_page_has_a_row_for_every_family() -> None:
    rows = [
        line.split("`")[1]
        for line in (DOCS / "models.md").read_text().splitlines()
        if line.startswith("| `") and "ForCausalLM" in line
    ]
    assert rows == list(FAMILIES)


def test_config_page_is_what_the_schema_says() -> None:
    assert (DOCS / "config.md").read_text() == config_page.page(), "run tools/config_page.py"


def test_readme_is_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 120


def test_the_way_from_acquire_to_the_unmap_leads_through_functions_that_are_there() -> None:
    _, _, section = (DOCS / "changeover.md").read_text().partition("## From Acquire to the unmap")
    rows = [line.split("|")[2:4] for line in section.partition("\n## ")[0].splitlines() if line.startswith("|") and "`" in line]
    assert len(rows) == 18
    for file, functions in rows:
        source = (DOCS.parent / "services/tasuki" / file.strip(" `")).read_text()
        for function in functions.split(","):
            assert f"def {function.strip(' `')}(" in source, f"{file.strip()} has no {function.strip()}"
