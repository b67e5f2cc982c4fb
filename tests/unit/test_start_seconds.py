"""Breakdown of a service's start-up time: parts add up to the total, as the service counts and as others read them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from tasuki.config.paths import LAUNCHED_VARIABLE
from tasuki.rollout.sglang.scheduler import count_seconds
from tasuki.rpc.process_start import StartSeconds, read_start_seconds, serves_line


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


def test_the_line_of_up_says_how_long_a_service_waited_before_its_launch() -> None:
    parts = {"imports": 3.25, "model": 1.0, "kernels": 0.01}
    assert serves_line("trainer", parts, after_s=4.5) == "trainer serves after 4.5 s: imports 3.2, model 1.0"
    assert serves_line("trainer", parts, after_s=30.0) == "trainer serves after 30.0 s: waiting 25.7, imports 3.2, model 1.0"
    assert serves_line("coordinator", {}, after_s=1.0) == "coordinator serves after 1.0 s"


def test_methods_of_sglangs_runner_are_counted_and_do_what_they_did() -> None:
    class Runner:
        def load_model(self) -> str:
            time.sleep(0.05)
            return "loaded"

        def alloc_memory_pool(self, size: int) -> int:
            return size

        def init_cuda_graphs(self) -> None:
            raise ValueError

    parts = count_seconds(Runner)
    assert (Runner().load_model(), Runner().alloc_memory_pool(3)) == ("loaded", 3)
    with pytest.raises(ValueError):
        Runner().init_cuda_graphs()
    assert set(parts) == {"weights", "KV cache", "graphs"} and 0.05 <= parts["weights"] < 5
