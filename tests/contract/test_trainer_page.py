"""docs/trainer.md has the table that the planner makes."""

from __future__ import annotations

from pathlib import Path

from tools import knobs_table

PAGE = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()


def test_the_table_of_settings_is_what_the_planner_says() -> None:
    assert knobs_table.table() in PAGE, "run tools/knobs_table.py"
