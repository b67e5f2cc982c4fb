"""Moments in host memory, on a learner of one rank: equal to AdamW on the device, in steps, checkpoints and resets."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tasuki.memory.host import host_memory
from tasuki.trainer import adamw as streamed
from tasuki.trainer import host_buffers
from tasuki.trainer.adamw import StreamedAdamW
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import MemoryTag
from tests.integration.learning import LOSSES, assert_equal, fsdp, learn, start_learner, train, trained, whole_parameters
from tests.integration.one_rank import mesh, model
from tests.integration.test_megatron import parameters
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE

__all__ = ["mesh", "model"]

SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "critic": {"learning_rate": 1e-2}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes more blocks than fit the device at a time, with some parameters in several."""
    monkeypatch.setattr(streamed, "BLOCK_BYTES", 1 << 14)


def start(model: Path, mesh: DeviceMesh, *, on_host: bool, **settings: Any) -> Learner:
    return start_learner(model, mesh=mesh, moments="host" if on_host else "gpu", **SETTINGS | settings)


def assert_alike(one: Learner, other: Learner) -> None:
    for role in LOSSES:
        assert_equal(*(whole_parameters(learner, role) for learner in (one, other)))


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}, {"param_dtype": "bfloat16"}], ids=["whole", "lora", "bf16"])
def test_steps_are_those_of_moments_on_the_device(model: Path, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    streamed, resident = (start(model, mesh, on_host=on_host, **settings) for on_host in (True, False))
    before = {role: whole_parameters(streamed, role) for role in LOSSES}
    train(streamed, 4)
    train(resident, 4)
    assert_alike(streamed, resident)
    for role, old_parameters in before.items():
        assert any(not torch.equal(whole_parameters(streamed, role)[name], old) for name, old in old_parameters.items())


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_steps_and_checkpoints_on_megatron_core_are_those_of_moments_on_the_device(
    model: Path, mesh: DeviceMesh, tmp_path: Path, param_dtype: str
) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for on_host in (True, False):
        for is_resumed in (False, True):
            learner = start(model, mesh, on_host=on_host, critic=None, backend="megatron", param_dtype=param_dtype)
            assert isinstance(cast(Any, learner.backend)._optimizer, StreamedAdamW) is on_host
            if is_resumed:
                learner.load_checkpoint(tmp_path / f"{on_host}")
            for _ in range(2 - is_resumed):
                learn(learner, Role.POLICY, decode_samples(make_samples(9, vocab_size=VOCAB_SIZE)), config=LOSSES[Role.POLICY])
                learner.optim_step(Role.POLICY)
                if learner.policy_version == 1:
                    learner.save_checkpoint(tmp_path / f"{on_host}")
            results.append(parameters(learner))
            learner.backend.close()
    for found in results[1:]:
        assert_equal(found, results[0])


def test_there_are_several_blocks_and_the_tag_is_empty(model: Path, mesh: DeviceMesh) -> None:
    learner = start(model, mesh, on_host=True)
    optimizer = trained(learner, Role.POLICY).optimizer
    assert isinstance(optimizer, StreamedAdamW)
    assert len(optimizer._blocks) > 2 * streamed.NUM_BLOCKS
    assert max(block.num_bytes for block in optimizer._blocks) <= streamed.BLOCK_BYTES
    assert {len(block.pieces) > 1 for block in optimizer._blocks if block.pieces[0].start == 0} == {True, False}
    assert any(block.pieces[0].start for block in optimizer._blocks), "a parameter larger than a block"
    usage = {MemoryTag.of(each.tag): each.total_bytes for each in fsdp(learner).memory.usage()}
    assert usage[MemoryTag.OPTIMIZER] == 0 < usage[MemoryTag.GRADIENTS]
    train(learner, 1)
    fsdp(learner).memory.pause_tags(TAGS)
    fsdp(learner).memory.resume_tags(TAGS)
    resident = start(model, mesh, on_host=False)
    train(learner, 1)
    train(resident, 2)
    assert_alike(learner, resident)


@pytest.mark.parametrize("saved_on_host", [True, False])
def test_a_checkpoint_goes_on_either_way(model: Path, mesh: DeviceMesh, tmp_path: Path, saved_on_host: bool) -> None:
    learner, other = (start(model, mesh, on_host=on_host) for on_host in (saved_on_host, not saved_on_host))
    train(learner, 2)
    learner.save_checkpoint(tmp_path / "two")
    other.load_checkpoint(tmp_path / "two")
    train(learner, 2)
    train(other, 2)
    assert_alike(learner, other)


def test_a_host_without_room_for_the_moments_is_told_at_the_start(
    model: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = host_memory()
    network = trained(start(model, mesh, on_host=True), Role.POLICY).network
    needed = 8 * sum(parameter.numel() for parameter in network.parameters())
    monkeypatch.setattr(host_buffers, "host_memory", lambda: replace(free, available_bytes=needed // 2))
    with pytest.raises(InvalidArgument, match=r'^trainer.moments: "host" needs \d+ bytes .*, but \d+ are available; remove it'):
        start(model, mesh, on_host=True)
    start(model, mesh, on_host=False)
