"""A learner of one rank in this process: runs, schedules, non-finite gradients, and a critic beside the policy."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tasuki.algorithms.loss_types import Correction, LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.models.known import read_model
from tasuki.trainer.attention.packed import IMPLEMENTATION, PackedAttention
from tasuki.trainer.backends.fsdp.memory import guard
from tasuki.trainer.backends.fsdp.model import Policy, groups_of
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner, scheduled_rate
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.errors import GradientsNotFinite, InvalidArgument
from tasuki.wire.stages import MemoryTag
from tests.integration.learning import fsdp, learn, start_learner, trained, whole_parameters
from tests.integration.one_rank import mesh, model
from tests.integration.plain_critic import value_samples
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE

__all__ = ["mesh", "model"]

LOSSES = {Role.POLICY: LossConfig(correction=Correction(token_truncation=None)), Role.CRITIC: LossConfig(loss=ValueLoss())}
CRITIC = {"learning_rate": 1e-2}


@pytest.fixture(scope="module")
def samples() -> Samples:
    return decode_samples(value_samples(9))


def step(learner: Learner, role: Role, samples: Samples, **arguments: Any) -> float:
    """Makes one step of a role; returns its learning rate."""
    learn(learner, role, samples, config=LOSSES[role])
    return learner.optim_step(role, schedule_steps=3, **arguments).learning_rate


def scores(learner: Learner, role: Role, samples: Samples) -> list[float]:
    return learner.score(role, [token_batch(samples, device=learner.backend.device)])[0].tolist()


def moments(learner: Learner, role: Role) -> list[Tensor]:
    """Returns AdamW's state of every parameter, including the step count."""
    states = trained(learner, role).optimizer.optimizer.state.values()
    return [tensor.detach().clone() for state in states for tensor in state.values()]


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def broken(samples: Samples) -> Samples:
    """Returns samples whose gradients overflow."""
    huge_N = np.full_like(samples.columns["advantages"], 3e38)
    return replace(samples, columns={**samples.columns, "advantages": huge_N, "returns": huge_N})


def test_temperatures_are_not_rounded_to_the_compute_dtype(mesh: DeviceMesh, model: Path) -> None:
    samples = decode_samples(make_samples(9, vocab_size=VOCAB_SIZE, temperature=0.7))
    unsharded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    attention = PackedAttention("sdpa", read_model(unsharded.config.to_dict()).attention)
    learner = start_learner(model, mesh=mesh, compute_dtype="bfloat16")
    with torch.no_grad():
        expected, _ = Policy(unsharded, attention=attention)(token_batch(samples, device=learner.backend.device))
    # bfloat16 would round it to 0.69921875, visible in the third decimal place.
    assert scores(learner, Role.POLICY, samples) == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_run_with_fresh_optimizer_state_steps_as_a_fresh_optimizer_would(mesh: DeviceMesh, model: Path, samples: Samples):
    learner = start_learner(model, mesh=mesh, learning_rate=1e-3, critic=CRITIC)
    for role in learner.roles:
        step(learner, role, samples)
    learner.begin_run(keep_optimizer=True)
    kept = {role: moments(learner, role) for role in learner.roles}
    assert all(any(tensor.any() for tensor in tensors) for tensors in kept.values())
    learner.begin_run(keep_optimizer=False)
    assert not any(tensor.any() for role in learner.roles for tensor in moments(learner, role))
    network = trained(learner, Role.POLICY).network
    parameters = list(network.parameters())
    learn(learner, Role.POLICY, samples, config=LOSSES[Role.POLICY])
    learner.backend.clip_gradients(Role.POLICY)
    copies = [param.full_tensor().detach().clone().requires_grad_() for param in parameters]
    for copy, param in zip(copies, parameters, strict=True):
        copy.grad = param.grad.full_tensor().clone()
    torch.optim.AdamW(copies, lr=1e-3, weight_decay=0.0).step()
    learner.optim_step(Role.POLICY)
    for copy, param in zip(copies, parameters, strict=True):
        torch.testing.assert_close(param.full_tensor(), copy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_gradients_that_are_not_finite_change_nothing(mesh: DeviceMesh, model: Path, samples: Samples, role: Role, action: str):
    learner = start_learner(model, mesh=mesh, on_non_finite=action, critic=CRITIC)
    step(learner, role, samples)
    parameters, state = whole_parameters(learner, role), moments(learner, role)
    learn(learner, role, broken(samples), config=LOSSES[role])
    if action == "stop":
        with pytest.raises(GradientsNotFinite, match=f"the {role}'s gradient norm is"):
            learner.optim_step(role)
    else:
        report = learner.optim_step(role)
        assert (report.is_skipped, report.version) == (True, 1)
        assert not np.isfinite(report.grad_norm)
    assert (learner.roles[role].version, learner.roles[role].has_gradients) == (1, False)
    assert are_equal(whole_parameters(learner, role), parameters)
    assert all(torch.equal(*pair) for pair in zip(moments(learner, role), state, strict=True))
    assert all(not param.grad.full_tensor().any() for param in trained(learner, role).network.parameters())
    learn(learner, role, samples, config=LOSSES[role])
    assert learner.optim_step(role).version == 2


def test_a_checkpoint_brings_back_both_roles_and_their_schedules(
    mesh: DeviceMesh, model: Path, samples: Samples, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-3, "lora": {"rank": 4}, "critic": {**CRITIC, "lora_rank": 2}}
    learner, other = (start_learner(model, mesh=mesh, **settings) for _ in range(2))
    step(learner, Role.POLICY, samples)
    step(learner, Role.CRITIC, samples)
    learner.begin_run(keep_optimizer=True)
    step(learner, Role.CRITIC, samples)
    learner.save_checkpoint(tmp_path / "saved")
    learn(other, Role.CRITIC, samples, config=LOSSES[Role.CRITIC])
    other.load_checkpoint(tmp_path / "saved")
    assert {role: (state.version, state.schedule_start, state.has_gradients) for role, state in other.roles.items()} == {
        Role.POLICY: (1, 1, False),
        Role.CRITIC: (2, 1, False),
    }
    for role in (Role.POLICY, Role.CRITIC):
        assert scores(other, role, samples) == scores(learner, role, samples)
        for each in (learner, other):
            step(each, role, samples)
        assert are_equal(whole_parameters(other, role), whole_parameters(learner, role))
    # Older weights are a new version, at the checkpoint's step of the schedule.
    learner.load_checkpoint(tmp_path / "saved")
    policy = learner.roles[Role.POLICY]
    assert (policy.version, policy.version - policy.schedule_start) == (3, 0)
    other.load_checkpoint(tmp_path / "saved", as_version=9)
    assert (other.policy_version, other.roles[Role.POLICY].schedule_start) == (9, 9)
    assert are_equal(whole_parameters(other, Role.POLICY), whole_parameters(learner, Role.POLICY))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"rms_norm_eps": 1e-3}, "holds a policy with rms_norm_eps 1e-06 in config.json, but the trainer's has 0.001;"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "holds a policy with rope_parameters .*10000.*500000",
        ),
        ({"max_position_embeddings": 2048}, None),
    ],
)
def test_a_checkpoint_of_the_same_shapes_but_another_model_is_refused(
    mesh: DeviceMesh, model: Path, tmp_path: Path, changed: dict[str, Any], problem: str | None
) -> None:
    start_learner(model, mesh=mesh).save_checkpoint(tmp_path / "saved")
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changed))
    learner = start_learner(other, mesh=mesh)
    if problem is None:
        learner.load_checkpoint(tmp_path / "saved")
        return
    with pytest.raises(InvalidArgument, match=problem):
        learner.load_checkpoint(tmp_path / "saved")


def test_a_sleep_keeps_every_byte_of_the_critic(mesh: DeviceMesh, model: Path, samples: Samples) -> None:
    learner = start_learner(model, mesh=mesh, critic=CRITIC, lora={"rank": 4})
    step(learner, Role.CRITIC, samples)
    network, memory = trained(learner, Role.CRITIC).network, fsdp(learner).memory

    def everything() -> list[Tensor]:
        params = [tensor.full_tensor() for param in network.parameters() for tensor in (param.detach(), param.grad)]
        return [*(tensor.clone() for tensor in params), *moments(learner, Role.CRITIC)]

    before, mapped = everything(), sum(usage.mapped_bytes for usage in memory.usage())
    released = memory.pause_tags(TAGS)
    # Weights, gradients and two moments in float32, except the small tensors, which stay.
    assert released > 0.9 * 16 * learner.backend.num_parameters(Role.CRITIC)
    assert sum(usage.mapped_bytes for usage in memory.usage()) == mapped - released
    memory.resume_tags(TAGS)
    memory.wait_for_content()
    assert all(torch.equal(*pair) for pair in zip(everything(), before, strict=True))


def test_a_forward_pass_asks_for_the_weights_that_come_back_group_by_group(
    mesh: DeviceMesh, model: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = start_learner(model, mesh=mesh)
    network, returning = trained(learner, Role.POLICY).network, fsdp(learner).memory._onload
    ends: list[int] = []

    class Transfer:
        def wait_on_stream(self, stream: int, *, address: int, num_bytes: int) -> None:
            assert stream == 42
            ends.append(address + num_bytes)

        def wait(self) -> int:
            return 0

    stream = SimpleNamespace(cuda_stream=42)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr("tasuki.trainer.backends.fsdp.memory._gathering_stream", lambda _group: stream)
    guard(groups_of(network), returning)
    returning._transfers[MemoryTag.WEIGHTS] = cast(Any, Transfer())
    step(learner, Role.POLICY, samples)
    shards = [param.to_local() for param in network.parameters() if isinstance(param, DTensor)]
    assert ends[0::2] == ends[1::2], "both the stream that computes and the one that gathers"
    assert ends[0] < ends[2] < ends[4], "the embedding before the layers"
    assert max(ends) == max(shard.data_ptr() + shard.nbytes for shard in shards)
    assert len(set(ends)) == len(groups(learner))
    assert not returning._transfers, "the optimizer has waited for all"


def groups(learner: Learner) -> list[Any]:
    """Returns FSDP2's parameters of the policy, by group."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in groups_of(trained(learner, Role.POLICY).network)]
    return [group.fsdp_params for group in groups if group is not None]


def test_gradients_are_in_their_shards_after_every_micro_batch(mesh: DeviceMesh, model: Path, samples: Samples) -> None:
    learner = start_learner(model, mesh=mesh)
    gradients = trained(learner, Role.POLICY).optimizer._gradients
    addresses = [gradient.data_ptr() for gradient in gradients]
    norms: list[float] = []

    def look() -> None:
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        for param in (param for group in groups(learner) for param in group):
            assert param.unsharded_accumulated_grad is None
            assert param._unsharded_param.grad is None

    learner._progressed = look
    learn(learner, Role.POLICY, samples, config=LOSSES[Role.POLICY], max_tokens=32)
    assert len(norms) > 2
    assert len({0.0, *norms}) == len(norms) + 1
    assert [gradient.data_ptr() for gradient in gradients] == addresses


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "num_steps", "rates"),
    [
        ("constant", 3, None, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        ("linear", 0, 4, {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0, 5: 0.0}),
        ("linear", 5, 5, {5: 1.0, 6: 0.0}),  # a warm-up as long as the schedule
        ("cosine", 2, 6, {1: 2 / 3, 2: 1.0, 4: 0.5, 6: 0.0, 9: 0.0}),
    ],
)
def test_rates_rise_to_the_peak_and_fall_to_zero(
    schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int | None, rates: dict[int, float]
) -> None:
    config = OptimizerConfig(learning_rate=1.0, lr_schedule=schedule, warmup_steps=warmup_steps)
    assert {step: scheduled_rate(config, step, num_steps=num_steps) for step in rates} == pytest.approx(rates)
