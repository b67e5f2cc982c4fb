"""8-bit moments, on learners of one and two ranks: rounded as by torchao, as large as planned, and kept by checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor
from torchao.optim.subclass_8bit import OptimState8bit

from tasuki.planner.node import Part
from tasuki.planner.trainer_bytes import moment_block, trainer_tags
from tasuki.trainer.backends.fsdp import optimizer as quantized
from tasuki.trainer.backends.fsdp.optimizer import QuantizedMoment
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import MemoryTag
from tests.integration.launched import run_ranks
from tests.integration.learning import (
    LOSSES,
    assert_equal,
    fsdp,
    learn,
    start_learner,
    train,
    trained,
    whole_gradients,
    whole_parameters,
)
from tests.integration.one_rank import mesh, model
from tests.integration.plain_critic import value_samples
from tests.models import make_model, save_checkpoint

__all__ = ["mesh", "model"]

RATE, DECAY = 1e-3, 0.1
SETTINGS = {"learning_rate": RATE, "weight_decay": DECAY, "critic": {"learning_rate": 1e-2}}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts a matrix into several chunks, the last of which is shorter."""
    monkeypatch.setattr(quantized, "CHUNK_ELEMENTS", 1700)


def start(model: Path, mesh: DeviceMesh, *, is_8bit: bool = True, **settings: Any) -> Learner:
    return start_learner(model, mesh=mesh, moments="8bit" if is_8bit else "gpu", **SETTINGS | settings)


def state_of(learner: Learner, role: Role = Role.POLICY) -> dict[str, dict[str, Tensor]]:
    """Returns the optimizer's state, by parameter name."""
    network, optimizer = trained(learner, role).network, trained(learner, role).optimizer.optimizer
    return {
        name.removeprefix("causal_lm."): optimizer.state[param]
        for name, param in network.named_parameters()
        if param.requires_grad
    }


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_moment_is_rounded_as_torchao_rounds_it(is_signed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows_RC = torch.randn(40, 512, generator=generator) * torch.logspace(-12, 3, 40).unsqueeze(1)
    rows_RC = rows_RC if is_signed else rows_RC.square()
    rows_RC[5] = 0.0
    moment = QuantizedMoment(torch.zeros(40, 512, dtype=torch.uint8), torch.zeros(40, 2), is_signed)
    for rows in (slice(0, 33), slice(33, 40)):
        moment.write(rows, rows_RC[rows])
    value_map = torch.tensor(create_dynamic_map(signed=is_signed))
    scaled_RC, scales = scale_tensor(rows_RC, 256)
    codes_RC = quantize_8bit_with_qmap(scaled_RC, value_map)
    expected_RC = dequant_with_qmap(codes_RC, value_map, scales)
    found_RC = moment.read(slice(0, 40), dtype=torch.float32)
    torch.testing.assert_close(found_RC, expected_RC, rtol=1e-6, atol=1e-12)
    assert not found_RC[5].any()
    # Each code is one of 256 values, so the error is at most half of the widest gap.
    widest = value_map.diff().max() / 2
    assert (
        (found_RC - rows_RC).abs() <= widest * 1.001 * rows_RC.unflatten(-1, (2, 256)).abs().amax(-1).repeat_interleave(256, 1)
    ).all()


def test_steps_are_those_of_torchao(model: Path, mesh: DeviceMesh) -> None:
    learner = start(model, mesh, max_grad_norm=1e9)
    name = "model.layers.0.mlp.gate_proj.weight"
    value = whole_parameters(learner, Role.POLICY)[name]
    block = moment_block(value.shape)
    assert block == 64
    theirs = [OptimState8bit.zeros(value.shape, signed=signed, block_size=block) for signed in (True, False)]
    samples, count = decode_samples(value_samples(9)), torch.tensor(0.0)
    for _ in range(6):
        learn(learner, Role.POLICY, samples, config=LOSSES[Role.POLICY])
        gradient = whole_gradients(learner, Role.POLICY)[name]
        learner.optim_step(Role.POLICY)
        count += 1
        single_param_adam(
            value, gradient, count, *theirs, None, torch.tensor(RATE), *(0.9, 0.999), DECAY, 1e-8,
            IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False,
        )  # fmt: skip
    # A value halfway between two codes may be rounded either way.
    found = whole_parameters(learner, Role.POLICY)[name]
    assert (found - value).abs().mean() < 1e-3 * RATE
    state = state_of(learner)[name]
    assert (state["exp_avg_codes"].to_local() == theirs[0].codes).float().mean() > 0.99
    torch.testing.assert_close(state["exp_avg_sq_scales"].to_local().flatten(), theirs[1].scale, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 32}}, {"param_dtype": "bfloat16"}], ids=["whole", "lora", "bf16"])
def test_a_run_is_close_to_one_with_moments_in_full(model: Path, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    rounded, full = (start(model, mesh, is_8bit=is_8bit, **settings) for is_8bit in (True, False))
    before = whole_parameters(full, Role.POLICY)
    train(rounded, 8)
    train(full, 8)
    found, expected = (whole_parameters(learner, Role.POLICY) for learner in (rounded, full))
    moved = sum((expected[name] - old).float().square().sum() for name, old in before.items()).sqrt()
    apart = sum((expected[name] - found[name]).float().square().sum() for name in before).sqrt()
    assert 0 < apart < 0.15 * moved


def test_memory_is_a_quarter_and_as_planned_and_sleeps(mesh: DeviceMesh, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096}
    model = save_checkpoint(make_model("llama", seed=0, **sizes), tmp_path / "llama")
    learner, full = (start(model, mesh, is_8bit=is_8bit) for is_8bit in (True, False))
    quantized = [name for name, state in state_of(learner).items() if "exp_avg_codes" in state]
    assert any("embed_tokens" in name for name in quantized) and not any("norm" in name for name in quantized)
    assert "value_head.weight" not in [
        name for name, state in state_of(learner, Role.CRITIC).items() if "exp_avg_codes" in state
    ]
    usages = [{MemoryTag.of(each.tag): each.total_bytes for each in fsdp(each).memory.usage()} for each in (learner, full)]
    rounded, whole = (usage[MemoryTag.OPTIMIZER] for usage in usages)
    assert rounded == trainer_tags(fsdp(learner)._planned)[Part.OPTIMIZER]
    assert rounded < 0.3 * whole
    train(learner, 1)
    before = {name: {key: tensor.clone() for key, tensor in state.items()} for name, state in state_of(learner).items()}
    fsdp(learner).memory.pause_tags(TAGS)
    fsdp(learner).memory.resume_tags(TAGS)
    for name, state in state_of(learner).items():
        for key, tensor in state.items():
            assert torch.equal(tensor, before[name][key]), (name, key)


def test_a_run_begins_with_fresh_moments(model: Path, mesh: DeviceMesh) -> None:
    learner, other = (start(model, mesh) for _ in range(2))
    gradients = [learn(learner, Role.POLICY, decode_samples(value_samples(9)), config=LOSSES[Role.POLICY]).loss]
    learner.optim_step(Role.POLICY, learning_rate=0.0)
    learner.begin_run(keep_optimizer=False)
    gradients += [
        learn(each, Role.POLICY, decode_samples(value_samples(9)), config=LOSSES[Role.POLICY]).loss for each in (learner, other)
    ]
    assert len(set(gradients)) == 1
    for each in (learner, other):
        each.optim_step(Role.POLICY)
    assert_equal(*(whole_parameters(each, Role.POLICY) for each in (learner, other)))


def save_after_two_steps(mesh: DeviceMesh, model: Path, folder: Path) -> None:
    learner = start(model, mesh)
    train(learner, 2)
    learner.save_checkpoint(folder / "two")


def test_a_checkpoint_of_two_ranks_goes_on_with_one(model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    run_ranks(save_after_two_steps, model, tmp_path, num_ranks=2)
    resumed, whole = start(model, mesh), start(model, mesh)
    resumed.load_checkpoint(tmp_path / "two")
    train(whole, 2)
    for role in LOSSES:
        for name, state in state_of(whole, role).items():
            for key, tensor in state.items():
                found = state_of(resumed, role)[name][key]
                if key.endswith("_codes"):
                    assert ((found.to_local().int() - tensor.to_local().int()).abs() <= 1).float().mean() > 0.99, (name, key)
    train(resumed, 1)
    train(whole, 1)
    found, expected = (whole_parameters(each, Role.POLICY) for each in (resumed, whole))
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().mean() < 2e-2 * RATE, name


@pytest.mark.parametrize("is_8bit", [True, False])
def test_a_checkpoint_of_the_other_kind_is_refused(model: Path, mesh: DeviceMesh, tmp_path: Path, is_8bit: bool) -> None:
    start(model, mesh, is_8bit=is_8bit).save_checkpoint(tmp_path / "saved")
    with pytest.raises(InvalidArgument, match='trainer.moments = "8bit"' if is_8bit else 'trainer.moments other than "8bit"'):
        start(model, mesh, is_8bit=not is_8bit).load_checkpoint(tmp_path / "saved")
