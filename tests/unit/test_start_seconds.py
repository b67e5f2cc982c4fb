"""Breakdown of a service's start-up time: parts add up to the total, as the service counts and as others read them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from tasuki.config.paths import LAUNCHED_VARIABLE
from tasuki.rpc.process_start import StartSeconds, read_start_seconds


def test_parts_count_from_the_launch_and_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    launched = time.monotonic() - 5.0
    start = StartSeconds({LAUNCHED_VARIABLE: str(launched)})
    start.end("imports")
    time.sleep(0.2)
    start.end("engine", within={"weights": 0.1, "graphs": 0.05})
    before = time.monotonic()
    start.end("imports")
    after = time.monotonic()
    assert list(start.parts) == ["imports", "weights", "graphs", "engine"]
    assert start.parts["imports"] >= 5.0 and start.parts["weights"] == 0.1 and start.parts["engine"] >= 0.05
    assert before - launched <= sum(start.parts.values()) + 1e-6 <= after - launched + 2e-6
    assert read_start_seconds(tmp_path, "rollout") == {}
    start.tell(tmp_path, "rollout")
    assert read_start_seconds(tmp_path, "rollout") == pytest.approx(start.parts, abs=0.001)
    assert "event=started_in seconds=" in caplog.text
