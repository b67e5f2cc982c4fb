"""Layers that FSDP2 gathers, on a learner of one rank: bytes, and when they are freed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from tasuki.algorithms.loss_types import LossConfig
from tasuki.planner.node import Part
from tasuki.planner.step_bytes import step_moments
from tasuki.trainer.backends.fsdp.model import groups_of
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tests.integration.learning import assert_equal, fsdp, learn, start_learner, trained, whole_gradients
from tests.integration.one_rank import mesh, model
from tests.integration.plain_critic import value_samples

__all__ = ["mesh", "model"]

LOSS = LossConfig()
SAMPLES = decode_samples(value_samples(9))


def start(model: Path, mesh: DeviceMesh) -> Learner:
    return start_learner(model, mesh=mesh, learning_rate=1e-3)


def gathered(learner: Learner) -> list[FSDPParam]:
    """Returns the policy's parameters that are currently unsharded."""
    states = [module._get_fsdp_state() for module in groups_of(trained(learner, Role.POLICY).network)]
    params = [param for state in states if state._fsdp_param_group is not None for param in state._fsdp_param_group.fsdp_params]
    return [param for param in params if param.sharded_state is ShardedState.UNSHARDED]


def at_loss(learner: Learner) -> list[int]:
    """Returns the gathered bytes at the start of each micro-batch's backward."""
    sizes: list[int] = []
    backward = learner.backend.backward

    def look(role: Role, loss: Tensor, *, share: float) -> None:
        sizes.append(sum(param._unsharded_param.nbytes for param in gathered(learner)))
        backward(role, loss, share=share)

    learner.backend.backward = look
    learn(learner, Role.POLICY, SAMPLES, config=LOSS, max_tokens=48)
    learner.backend.backward = backward
    return sizes


def test_layers_are_whole_at_the_loss_as_planned(model: Path, mesh: DeviceMesh) -> None:
    learner = start(model, mesh)
    layout = fsdp(learner)._planned
    # The planner includes the projection's gradient.
    planned = step_moments(layout)["loss"][Part.LAYERS] - layout.model.num_outputs * layout.model.hidden_size * 4
    sizes = at_loss(learner)
    assert len(sizes) > 1 and set(sizes) == {planned}
    assert not gathered(learner), "backward has freed them"
    learner.score(Role.POLICY, [token_batch(SAMPLES, device=learner.backend.device)])
    assert not gathered(learner), "scoring has freed them"


def test_a_call_that_fails_between_forward_and_backward_leaves_no_old_weights(
    model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start(model, mesh)
    learn(other, Role.POLICY, SAMPLES, config=LOSS)
    other.optim_step(Role.POLICY)
    other.save_checkpoint(tmp_path / "other")
    learner = start(model, mesh)

    def fail(role: Role, loss: Tensor, **_: float) -> None:
        raise torch.OutOfMemoryError(f"no room for the {role}'s gradients of {loss:.3f}")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(learner.backend, "backward", fail)
        learn(learner, Role.POLICY, SAMPLES, config=LOSS)
    assert not gathered(learner)
    learner.load_checkpoint(tmp_path / "other")
    for each in (learner, other):
        learn(each, Role.POLICY, SAMPLES, config=LOSS)
    assert_equal(*(whole_gradients(each, Role.POLICY) for each in (learner, other)))
