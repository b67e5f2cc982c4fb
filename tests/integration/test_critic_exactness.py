"""Critic steps over FSDP2 ranks against plain torch in one process: results do not depend on the cut."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.critic_steps import NUM_SAMPLES, NUM_STEPS
from tests.integration.launched import run_ranks
from tests.integration.plain_critic import PlainCritic, PlainCriticStep, add_head, value_samples
from tests.models import make_model, save_checkpoint

BUDGETS = (23, 4096)
"""Tokens per micro-batch, padding included: one long sample, or all samples."""


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
        run_ranks("critic_steps.py", folder, model, *BUDGETS, num_ranks=num_ranks)
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
