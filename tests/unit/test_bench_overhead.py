"""Report of tests/bench/overhead.py from its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.overhead import report
from tests.bench.overhead_side import Turn
from tests.bench.pairs import paired


def test_report_compares_within_rounds_and_not_across_them() -> None:
    slow = {"off": Turn(2.0, {"trainer": 3.0, "coordinator": 1.0}), "watched": Turn(2.1, {"trainer": 3.1, "coordinator": 1.1})}
    fast = {"off": Turn(1.0, {"trainer": 2.0}), "watched": Turn(1.0, {"trainer": 2.02})}
    found: Any = report([slow, fast])
    assert found["more_step_s_percent"]["watched"]["median"] == pytest.approx(2.5)
    assert found["more_step_cpu_s_percent"]["watched"]["least"] == pytest.approx(1.0)
    assert found["more_step_cpu_s_percent"]["watched"]["greatest"] == pytest.approx(5.0)
    assert found["step_cpu_s"]["off"]["median"] == pytest.approx(3.0)
    assert found["step_cpu_s_by_process"]["coordinator"] == {"off": 0.5, "watched": 0.55}
    assert found["num_rounds"] == 2
    assert found["rounds"][1]["watched"] == {"step_s": 1.0, "step_cpu_s": {"trainer": 2.02}}


def test_a_machine_that_slows_a_turn_slows_the_work_of_the_step_alike() -> None:
    turns = {
        "off": Turn(2.0, {"trainer": 4.0, "train": 1.0}),
        "watched": Turn(3.03, {"trainer": 6.0, "train": 1.5, "dashboard": 0.2}),
    }
    found: Any = report([turns])
    assert found["more_step_s_percent"]["watched"]["median"] == pytest.approx(51.5)
    assert found["more_step_s_percent_at_equal_work_cpu"]["watched"]["median"] == pytest.approx(1.0)


def test_a_few_slow_turns_hardly_move_the_estimate() -> None:
    differences = [0.1, -0.2, 0.3, 0.0, 0.2, -0.1, 0.1, 0.0, 40.0, -25.0]
    found = paired(differences)
    assert found["estimate"] == pytest.approx(0.1, abs=0.06)
    # Averages of pairs beyond the eighth from each end, by the table of signed ranks for ten pairs.
    averages = sorted((a + b) / 2 for index, a in enumerate(differences) for b in differences[index:])
    assert (found["low"], found["high"]) == (averages[8], averages[-9])


def test_five_pairs_give_no_interval() -> None:
    assert paired([1.0, 2.0, 3.0, 4.0, 5.0])["low"] is None
