"""Layers that stay gathered from forward to backward, on a learner of one rank: gathered bytes, and unchanged results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.planner.layout import Part
from tasuki.planner.step_bytes import step_moments
from tasuki.trainer.backends.fsdp.model import groups_of
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration.learning import fsdp, learn, start_learner, trained, whole_gradients, whole_parameters
from tests.integration.one_rank import mesh, model
from tests.integration.plain_critic import value_samples

__all__ = ["mesh", "model"]

LOSSES = {Role.POLICY: LossConfig(), Role.CRITIC: LossConfig(loss=ValueLoss())}
SAMPLES = decode_samples(value_samples(9))


def start(model: Path, mesh: DeviceMesh, *, reshards: bool, **settings: Any) -> Learner:
    return start_learner(model, mesh=mesh, learning_rate=1e-3, reshard_after_forward=reshards, **settings)


def gathered(learner: Learner) -> list[FSDPParam]:
    """Returns the policy's parameters that are currently unsharded."""
    states = [module._get_fsdp_state() for module in groups_of(trained(learner, Role.POLICY).network)]
    params = [param for state in states if state._fsdp_param_group is not None for param in state._fsdp_param_group.fsdp_params]
    return [param for param in params if param.sharded_state is ShardedState.UNSHARDED]


def gathered_bytes(learner: Learner) -> int:
    return sum(param._unsharded_param.nbytes for param in gathered(learner))


def at_loss(learner: Learner) -> list[int]:
    """Returns the gathered bytes at the start of each micro-batch's backward."""
    sizes: list[int] = []
    backward = learner.backend.backward

    def look(role: Role, loss: Tensor) -> None:
        sizes.append(gathered_bytes(learner))
        backward(role, loss)

    learner.backend.backward = look
    learn(learner, Role.POLICY, SAMPLES, config=LOSSES[Role.POLICY], max_tokens=48)
    learner.backend.backward = backward
    return sizes


@pytest.mark.parametrize("reshards", [True, False])
def test_layers_are_whole_at_the_loss_as_configured_and_planned(model: Path, mesh: DeviceMesh, reshards: bool) -> None:
    learner = start(model, mesh, reshards=reshards)
    layout = fsdp(learner)._layout
    # The planner includes the projection's gradient.
    planned = step_moments(layout)["loss"][Part.LAYERS] - layout.model.num_outputs * layout.model.hidden_size * 4
    sizes = at_loss(learner)
    assert len(sizes) > 1 and set(sizes) == {planned}
    assert not gathered(learner), "backward has freed them"
    learner.score(Role.POLICY, [token_batch(SAMPLES, device=learner.backend.device)])
    assert not gathered(learner), "scoring has freed them"


def test_whole_layers_take_the_bytes_of_all_layers(model: Path, mesh: DeviceMesh) -> None:
    few, all_layers = (at_loss(start(model, mesh, reshards=reshards))[0] for reshards in (True, False))
    layers = trained(start(model, mesh, reshards=True), Role.POLICY).network.causal_lm.model.layers
    assert all_layers - few == sum(param.numel() * 4 for param in layers.parameters()) > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"checkpointing": "full"}, {"checkpointing": "attention", "lora": {"rank": 4}}, {"compute_dtype": "bfloat16"}],
    ids=["whole", "recomputed", "lora", "bf16"],
)
def test_no_bit_of_a_loss_gradient_or_parameter_changes(model: Path, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    learners = [start(model, mesh, reshards=reshards, critic={}, **settings) for reshards in (True, False)]
    for _ in range(3):
        for role, config in LOSSES.items():
            reports = [learn(learner, role, SAMPLES, config=config, max_tokens=48) for learner in learners]
            assert reports[0] == reports[1]
            assert_equal(*(whole_gradients(learner, role) for learner in learners))
            for learner in learners:
                learner.optim_step(role)
    for role in LOSSES:
        assert_equal(*(whole_parameters(learner, role) for learner in learners))


@pytest.mark.parametrize("reshards", [True, False])
def test_a_call_that_fails_between_forward_and_backward_leaves_no_old_weights(
    model: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reshards: bool
) -> None:
    other = start(model, mesh, reshards=True)
    learn(other, Role.POLICY, SAMPLES, config=LOSSES[Role.POLICY])
    other.optim_step(Role.POLICY)
    other.save_checkpoint(tmp_path / "other")
    learner = start(model, mesh, reshards=reshards)

    def fail(role: Role, loss: Tensor) -> None:
        raise torch.OutOfMemoryError(f"no room for the {role}'s gradients of {loss:.3f}")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(learner.backend, "backward", fail)
        learn(learner, Role.POLICY, SAMPLES, config=LOSSES[Role.POLICY])
    assert not gathered(learner)
    learner.load_checkpoint(tmp_path / "other")
    for each in (learner, other):
        learn(each, Role.POLICY, SAMPLES, config=LOSSES[Role.POLICY])
    assert_equal(*(whole_gradients(each, Role.POLICY) for each in (learner, other)))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
