"""A KL reference whose shards stay in host memory, on learners of one and of three ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.memory.host import HostMemory, host_memory
from tasuki.planner.trainer_bytes import host_reference
from tasuki.trainer import host_buffers
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import MemoryTag
from tests.integration.launched import run_ranks
from tests.integration.learning import fsdp, learn, start_learner
from tests.integration.one_rank import mesh
from tests.integration.plain_critic import value_samples
from tests.models import make_model, save_checkpoint

__all__ = ["mesh"]

SAMPLES = decode_samples(value_samples(9))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("llama", seed=0), tmp_path_factory.mktemp("model") / "llama")


def weights_bytes(learner: Learner) -> int:
    """Bytes in the tag's blocks, not in its chunks."""
    return fsdp(learner).memory._allocator.arena(MemoryTag.WEIGHTS).usage().used_bytes


def reference_scores(learner: Learner) -> torch.Tensor:
    return learner.score(Role.REFERENCE, [token_batch(SAMPLES, device=learner.backend.device)])[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_those_of_a_reference_on_the_device(model: Path, mesh: DeviceMesh, dtype: str) -> None:
    here, there = (
        start_learner(model, mesh=mesh, learning_rate=1e-2, compute_dtype=dtype, reference_on_host=on_host)
        for on_host in (False, True)
    )
    expected = reference_scores(here)
    assert torch.equal(reference_scores(there), expected)
    for learner in (here, there):
        learn(learner, Role.POLICY, SAMPLES, config=LossConfig())
        learner.optim_step(Role.POLICY)
        fsdp(learner).memory.pause_tags(TAGS)
        fsdp(learner).memory.resume_tags(TAGS)
    assert torch.equal(reference_scores(there), expected), "a step, a sleep and a return do not touch it"
    policy = there.score(Role.POLICY, [token_batch(SAMPLES, device=there.backend.device)])[0]
    assert not torch.equal(policy, expected)


@pytest.mark.parametrize("on_host", [False, True])
def test_the_tag_grows_only_by_a_reference_on_the_device(model: Path, mesh: DeviceMesh, on_host: bool) -> None:
    learner = start_learner(model, mesh=mesh, reference_on_host=on_host)
    before = weights_bytes(learner)
    reference_scores(learner)
    reference = fsdp(learner)._reference
    assert reference is not None
    num_bytes = sum(param.numel() * 4 for param in reference.parameters())
    assert weights_bytes(learner) - before == pytest.approx(0 if on_host else num_bytes, rel=0.02)
    assert host_reference(fsdp(learner)._planned) == pytest.approx(num_bytes if on_host else 0, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reference_on_host": True}, r"trainer.reference_on_host: true needs \d+ bytes of host memory for 1 ranks"),
        ({}, r"trainer.reference_on_host: unset \(no KL coefficient in \[train\]\) needs \d+ bytes"),
    ],
    ids=["on host", "unplanned"],
)
def test_a_host_without_room_refuses_and_the_learner_goes_on(
    model: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    learner = start_learner(model, mesh=mesh, **settings)
    with monkeypatch.context() as patch, pytest.raises(InvalidArgument, match=text) as refused:
        patch.setattr(host_buffers, "host_memory", lambda: HostMemory(total_bytes=1 << 40, available_bytes=4096))
        reference_scores(learner)
    assert "4096 are available" in str(refused.value) and int(refused.value.metadata["needed_bytes"]) > 4096
    assert host_memory().available_bytes > 4096
    assert reference_scores(learner).isfinite().all()
    learn(learner, Role.POLICY, SAMPLES, config=LossConfig())
    learner.optim_step(Role.POLICY)


def score_both_ways(mesh: DeviceMesh, models: Sequence[Path]) -> None:
    for model in models:
        learners = [start_learner(model, mesh=mesh, reference_on_host=on_host) for on_host in (False, True)]
        batch = token_batch(SAMPLES, device=learners[0].backend.device)
        here, there = (learner.score(Role.REFERENCE, [batch, batch]) for learner in learners)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))


def test_uneven_shards_of_three_ranks_score_alike(tmp_path: Path) -> None:
    """131 rows of embeddings are not divisible by 3, so FSDP2 pads that shard."""
    kinds = [save_checkpoint(make_model(kind, seed=2), tmp_path / kind) for kind in ("qwen2_tied", "qwen3_moe")]
    run_ranks(score_both_ways, kinds, num_ranks=3)
