"""Return of torch's cached blocks by the trainer: when, how often it is tried, and the planner's count. torch's figures are scripted."""

from collections.abc import Sequence

import pytest
import torch

from tasuki.planner.node import GB, Part
from tasuki.planner.plan import plan
from tasuki.trainer import memory as torch_cache
from tasuki.wire.stages import Stage
from tests.planned import node_with


@pytest.mark.parametrize(
    ("left_gb", "tries"), [([0.2], 1), ([0.999], 1), ([1.0, 0.5], 2), ([5.0, 3.0, 0.1], 3), ([5.0, 3.0, 2.0], 3)], ids=str
)
def test_it_tries_until_less_than_1_gb_is_cached_and_at_most_three_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_gb: Sequence[float], tries: int
) -> None:
    calls: list[str] = []
    left = iter(left_gb)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch_cache, "torch_pool", lambda index: (int(next(left) * GB) + 7 * GB, 7 * GB))
    found = torch_cache.TorchCache(torch.device("cuda", 0)).return_blocks()
    assert calls == ["empty", *["wait", "empty"] * (tries - 1)]
    assert found == int(left_gb[tries - 1] * GB)
    assert ("event=cache_kept" in caplog.text) is (found >= GB)


def test_bytes_that_all_tries_have_left_are_tried_once_until_there_are_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter([5.0, 3.0, 3.0, 3.05, 2.0, 2.5, 2.4, 2.4, 2.45])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch_cache, "torch_pool", lambda index: (int(next(left) * GB) + 7 * GB, 7 * GB))
    cache = torch_cache.TorchCache(torch.device("cuda", 0))
    assert [cache.return_blocks() / GB for _ in range(5)] == pytest.approx([3.0, 3.05, 2.0, 2.4, 2.45])
    assert caplog.text.count("event=cache_kept") == 2


def test_an_engine_wakes_beside_the_cache() -> None:
    planned = plan(node_with(num_ranks=2, rollout={"tp_size": 2, "kv_ratio": 0.5}))
    for stage in (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC):
        assert planned.stage(stage).gpus[0][Part.TORCH_CACHE] > GB
    assert Part.TORCH_CACHE not in planned.stage(Stage.OFFLOAD).gpus[0]
