"""Critic steps over FSDP2 ranks against plain torch in one process: results do not depend on the cut."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, micro_batches, start_learner, whole_gradients, whole_parameters, with_denominator
from tests.integration.plain_critic import SETTINGS, SHARED, VALUE_CLIP, PlainCritic, PlainCriticStep, add_head, value_samples
from tests.models import make_model, save_checkpoint

BUDGETS = (23, 4096)
"""Tokens per micro-batch, padding included: one long sample, or all samples."""


NUM_SAMPLES, NUM_STEPS = 17, 3


def run_steps(mesh: DeviceMesh, output: Path, model: Path) -> None:
    for max_tokens in BUDGETS:
        run_steps_of(mesh, output, model, max_tokens)


def run_steps_of(mesh: DeviceMesh, output: Path, model: Path, max_tokens: int) -> None:
    """Steps of a critic beside a policy with adapters; rank 0 writes the results."""
    learner = start_learner(model, mesh=mesh, lora={"rank": 4}, critic=SETTINGS, **SHARED)
    samples = decode_samples(value_samples(NUM_SAMPLES))
    config = with_denominator(LossConfig(loss=ValueLoss(clip=VALUE_CLIP)), samples)
    batches = micro_batches(learner, samples, config=config, max_tokens=max_tokens)
    facts = {"losses": [], "grad_norms": [], "num_micro_batches": len(batches)}
    tensors = {}
    policy = whole_parameters(learner, Role.POLICY)
    # In the order of the call; only a rank that holds all samples returns every value.
    everything = micro_batches(learner, samples, config=config, max_tokens=4096)
    facts["values"] = learner.score(Role.CRITIC, [batch.tokens for batch in everything])[0].tolist()
    for _ in range(NUM_STEPS):
        facts["losses"].append(learn(learner, Role.CRITIC, samples, config=config, max_tokens=max_tokens).loss)
        tensors = {f"gradient.{name}": tensor for name, tensor in whole_gradients(learner, Role.CRITIC).items()}
        facts["grad_norms"].append(learner.optim_step(Role.CRITIC).grad_norm)
    tensors |= {f"parameter.{name}": tensor for name, tensor in whole_parameters(learner, Role.CRITIC).items()}
    after = whole_parameters(learner, Role.POLICY)
    facts["is_policy_equal"] = all(bool((after[name] == before).all()) for name, before in policy.items())
    facts["versions"] = {role: state.version for role, state in learner.roles.items()}
    if dist.get_rank() == 0:
        save_file(tensors, output / f"{max_tokens}.safetensors")
        (output / f"{max_tokens}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(make_model("qwen2", seed=3), tmp_path_factory.mktemp("critic") / "model")
    add_head(folder)
    return folder


@pytest.fixture(scope="module")
def steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of results by number of ranks."""
    folders = {num_ranks: tmp_path_factory.mktemp("steps") for num_ranks in (1, 2)}
    for num_ranks, folder in folders.items():
        run_ranks(run_steps, folder, model, num_ranks=num_ranks)
    return folders


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[list[float], list[PlainCriticStep], PlainCritic]:
    """Returns the values before the first step, each step, and the critic after them."""
    critic, samples = PlainCritic(model), value_samples(NUM_SAMPLES)
    with torch.no_grad():
        values = torch.cat([critic.values(sample) for sample in samples]).tolist()
    return values, [critic.step(samples) for _ in range(NUM_STEPS)], critic


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_a_critics_steps_equal_plain_torch_however_they_are_cut(
    steps: dict[int, Path], plain: tuple[list[float], list[PlainCriticStep], PlainCritic], num_ranks: int, max_tokens: int
) -> None:
    facts = json.loads((steps[num_ranks] / f"{max_tokens}.json").read_text())
    tensors = load_file(steps[num_ranks] / f"{max_tokens}.safetensors")
    values, plain_steps, critic = plain
    if num_ranks == 1:
        assert sorted(facts["values"]) == pytest.approx(sorted(values), abs=1e-5)
    assert (facts["num_micro_batches"] > 1) is (max_tokens < 4096)
    assert facts["losses"] == pytest.approx([step.loss for step in plain_steps], rel=1e-5)
    assert facts["losses"][-1] < facts["losses"][0]
    assert facts["grad_norms"] == pytest.approx([step.grad_norm for step in plain_steps], rel=1e-4)
    for name, gradient in plain_steps[-1].gradients.items():
        torch.testing.assert_close(tensors[f"gradient.{name}"], gradient, rtol=1e-4, atol=1e-5)
    for name, param in critic.params.items():
        torch.testing.assert_close(tensors[f"parameter.{name}"], param.detach(), rtol=1e-4, atol=1e-5)
    assert facts["is_policy_equal"]
    assert facts["versions"] == {"policy": 0, "critic": NUM_STEPS}
