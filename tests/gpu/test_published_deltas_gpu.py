"""Deltas between two publications, written and applied by GPUs. Needs `make native`, CUDA GPUs and no network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.weight_exchange import TrainerRank, assert_hold, checkpoint, engines, published, receive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("trainer_gpus", [(0,), (0, 1)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("engine_gpus", [(0,), (1,), (0, 1)], ids=["GPU 0", "GPU 1", "TP 2"])
def test_deltas_lead_to_the_same_weights(tmp_path: Path, trainer_gpus: tuple[int, ...], engine_gpus: tuple[int, ...]) -> None:
    if torch.cuda.device_count() <= max(trainer_gpus + engine_gpus):
        pytest.skip("needs 2 GPUs")
    torch.manual_seed(0)
    settings = {"dtype": torch.float32, "in_place": False, "leaves": False, "has_deltas": True}
    ranks = [
        TrainerRank(tmp_path, gpu=gpu, rank=rank, num_ranks=len(trainer_gpus), **settings)
        for rank, gpu in enumerate(trainer_gpus)
    ]
    receivers = engines(engine_gpus)
    for version in range(4):
        received = receive(receivers, published(version, [rank.publish(version) for rank in ranks]))
        assert all(one.applied_deltas is (version > 0) for one in received)
        assert_hold(receivers, checkpoint([rank.shards for rank in ranks], torch.device("cuda", 0)))
        for rank in ranks:
            rank.drift()
    for rank in ranks:
        rank.close()
