"""What tests/bench/overhead.py makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.overhead import report
from tests.bench.overhead_side import Turn


def test_report_compares_within_pairs_and_not_across_them() -> None:
    slow = Turn(2.0, {"trainer": 3.0, "coordinator": 1.0}), Turn(2.1, {"trainer": 3.1, "coordinator": 1.1})
    fast = Turn(1.0, {"trainer": 2.0}), Turn(1.0, {"trainer": 2.02})
    found: Any = report([slow, fast])
    assert found["more_step_s_percent"]["median"] == pytest.approx(2.5)
    assert found["more_step_cpu_s_percent"]["least"] == pytest.approx(1.0)
    assert found["more_step_cpu_s_percent"]["greatest"] == pytest.approx(5.0)
    assert found["step_cpu_s"]["off"]["median"] == pytest.approx(3.0)
    assert found["step_cpu_s_by_process"]["coordinator"] == {"off": 0.5, "on": 0.55}
    assert found["num_pairs"] == 2
