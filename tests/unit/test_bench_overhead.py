"""What tests/bench/overhead.py makes of its measurements."""

from __future__ import annotations

import pytest

from tests.bench.overhead import Segment, report


def test_report_compares_within_pairs_and_not_across_them() -> None:
    slow = (Segment([2.0, 2.2, 2.1], cpu_s=4.0), Segment([2.1, 2.31, 2.205], cpu_s=4.2))
    fast = (Segment([1.0, 1.1, 1.05], cpu_s=2.0), Segment([1.0, 1.1, 1.05], cpu_s=2.02))
    found = report([slow, fast])
    assert found["ratio_of_step_s"] == pytest.approx({"median": 1.025, "least": 1.0, "greatest": 1.05})
    assert found["ratio_of_step_cpu_s"] == pytest.approx({"median": 1.03, "least": 1.01, "greatest": 1.05})
    assert found["step_cpu_s"]["off"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
