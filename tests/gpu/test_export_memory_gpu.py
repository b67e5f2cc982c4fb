"""Memory of published weights on real GPUs: parameters in place, copies that leave, trainers on some of the GPUs.

Needs `make native`, a CUDA GPU and no network.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.weight_exchange import TrainerRank, assert_hold, checkpoint, engines, published, receive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


GPU = torch.device("cuda:0")


MIB = 1 << 20


def free_bytes(gpu: int = 0) -> int:
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(gpu)[0]


MODES = [
    pytest.param(torch.bfloat16, True, id="in place"),
    pytest.param(torch.bfloat16, False, id="copied"),
    pytest.param(torch.float32, False, id="cast"),
]


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize(("dtype", "in_place"), MODES)
def test_round_after_round_arrives_by_one_plan_and_what_leaves_is_free_for_others(
    tmp_path: Path, dtype: torch.dtype, in_place: bool, leaves: bool
) -> None:
    trainer = TrainerRank(tmp_path, gpu=0, dtype=dtype, in_place=in_place, leaves=leaves)
    receivers = engines([0])
    plan = None
    for version in range(3):
        receive(receivers, published(version, [trainer.publish(version)]))
        wanted = checkpoint([trainer.shards], GPU)
        assert_hold(receivers, wanted)
        assert plan in (None, receivers[0].plan)
        plan = receivers[0].plan
        awake = free_bytes()
        released = trainer.offload()
        assert free_bytes() - awake >= released - 64 * MIB
        stay = in_place and not leaves
        assert released == 0 if stay else released >= 1 << 30
        trainer.load()
        trainer.train()
    trainer.close()


def test_a_publication_in_place_takes_no_memory_and_shares_nothing_else(tmp_path: Path) -> None:
    trainer = TrainerRank(tmp_path, gpu=0, dtype=torch.bfloat16, in_place=True, leaves=False)
    before = free_bytes()
    trainer.publish(0)
    assert before - free_bytes() < 16 * MIB
    assert trainer.export.copies is None
    places = [shard.local.data_ptr() for shard in trainer.shards]
    assert [held.data_ptr() for held in trainer.export._arena.tensors] == places
    assert sum(trainer.export._arena.manifest.chunk_bytes) < 1 << 30
    trainer.close()


SPREADS = {
    2: [((0,), (1,)), ((1,), (0, 1)), ((0, 1), (1,)), ((0, 1), (1, 0))],
    4: [((2, 3), (0, 1, 2, 3)), ((1,), (0, 1, 2, 3)), ((0, 1, 2, 3), (3,)), ((0, 1), (2, 3)), ((3, 2, 1, 0), (0, 2))],
}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize(("trainer_gpus", "engine_gpus"), [pair for pairs in SPREADS.values() for pair in pairs], ids=str)
def test_any_gpus_can_read_any_others(
    tmp_path: Path, trainer_gpus: tuple[int, ...], engine_gpus: tuple[int, ...], in_place: bool
) -> None:
    needed = max(*trainer_gpus, *engine_gpus) + 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "in_place": in_place, "leaves": True, "num_ranks": len(trainer_gpus)}
    ranks = [TrainerRank(tmp_path, gpu=gpu, rank=rank, **settings) for rank, gpu in enumerate(trainer_gpus)]
    receivers = engines(engine_gpus)
    for version in range(2):
        receive(receivers, published(version, [rank.publish(version) for rank in ranks]))
        assert_hold(receivers, checkpoint([rank.shards for rank in ranks], torch.device("cpu")))
        for rank in ranks:
            rank.offload()
            rank.load()
            rank.train()
    for rank in ranks:
        rank.close()
