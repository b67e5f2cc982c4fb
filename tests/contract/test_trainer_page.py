"""docs/trainer.md has the tables that the planner prints."""

from __future__ import annotations

from pathlib import Path

from tools import knobs_table

PAGE = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()


def test_the_tables_of_settings_are_what_the_planner_says() -> None:
    for table in (knobs_table.table(), knobs_table.experts_table()):
        assert table in PAGE, "run tools/knobs_table.py"
