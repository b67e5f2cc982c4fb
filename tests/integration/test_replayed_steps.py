"""Steps with given experts against transformers with the same, in every combination of what changes how a layer is computed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasuki.models.families import read_model_shape
from tasuki.models.routes import RouteShape
from tests.extent import IS_WHOLE, crossed
from tests.integration.launched import run_ranks
from tests.integration.replayed_ranks import routed_samples
from tests.integration.trainer_samples import PlainStep, plain_step_of
from tests.models import make_model, save_checkpoint
from tests.routes import force

KINDS = {"qwen3_moe": {"num_experts": 8}, "mixtral": {"num_local_experts": 8}, "glm4_moe": {"n_routed_experts": 8}}
TARGETS = ["q_proj", "v_proj"]
LORA = {"rank": 4, "alpha": 8, "target_modules": TARGETS}


def combinations(num_ranks: int) -> list[dict[str, Any]]:
    """Settings of [trainer], and whether adapters are trained."""
    spread = (False, True) if num_ranks > 1 else (False,)
    splits = (1, 2) if num_ranks > 1 else (1,)
    found = [
        {
            "expert_parallel": is_spread,
            "sequence_parallel": split,
            "lora": lora,
            "prefix_sharing": sharing,
            "checkpointing": kept,
        }
        for is_spread in spread
        for split in splits
        for (lora, sharing), kept in crossed(
            [(lora, sharing) for lora in (False, True) for sharing in (False, True)], ("none", "attention", "full", "offloaded")
        )
    ]
    tiled = {**found[0], "mlp_tile_tokens": 5}
    return [*found, tiled]


CASES = [
    (kind, num_ranks, json.dumps(settings))
    for kind in (KINDS if IS_WHOLE else ("glm4_moe",))
    for num_ranks in ((1, 2) if IS_WHOLE else (2,))
    for settings in combinations(num_ranks)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, settings in KINDS.items():
        save_checkpoint(make_model(kind, seed=3, **settings), folder / kind)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
        get_peft_model(loaded(folder / kind), config).save_pretrained(folder / f"{kind}-adapter")
    return folder


@pytest.fixture(scope="module")
def steps(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[dict[str, Any], Path]]:
    """Report and file of gradients, by family and settings."""
    found: dict[tuple[str, str], tuple[dict[str, Any], Path]] = {}
    for kind, num_ranks in sorted({case[:2] for case in CASES}):
        output = tmp_path_factory.mktemp("steps")
        asked = {settings_of(models, kind, case[2]): case[2] for case in CASES if case[:2] == (kind, num_ranks)}
        run_ranks("replayed_ranks.py", output, models / kind, *asked, num_ranks=num_ranks)
        for file in output.glob("*.json"):
            report = json.loads(file.read_text())
            found[kind, f"{num_ranks} {asked[report['settings']]}"] = report, file.with_suffix(".safetensors")
    return found


def settings_of(models: Path, kind: str, settings: str) -> str:
    given = json.loads(settings)
    given["lora"] = {**LORA, "path": str(models / f"{kind}-adapter")} if given["lora"] else None
    return json.dumps(given)


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@cache
def expected(folder: Path, has_adapter: bool) -> PlainStep:
    shape = RouteShape.of(read_model_shape(folder))
    assert shape is not None
    samples, routes = routed_samples(shape)
    base = loaded(folder)
    force(base, routes)
    if not has_adapter:
        return plain_step_of(base, samples)
    return plain_step_of(PeftModel.from_pretrained(base, f"{folder}-adapter", is_trainable=True), samples)


@pytest.mark.parametrize(("kind", "num_ranks", "settings"), CASES)
def test_a_step_with_given_experts_equals_that_of_transformers(
    steps: dict[tuple[str, str], tuple[dict[str, Any], Path]], models: Path, kind: str, num_ranks: int, settings: str
) -> None:
    report, file = steps[kind, f"{num_ranks} {settings}"]
    plain, gradients = expected(models / kind, json.loads(settings)["lora"]), load_file(file)
    assert report["loss"] == pytest.approx(plain.loss, abs=1e-5)
    assert report["metrics"]["log_prob_gap"] == pytest.approx(plain.log_prob_gap, abs=1e-5)
    assert 0.5 < report["metrics"]["router_disagreement"] < 1, "two of eight are drawn at random"
    assert gradients and len(gradients) == len(plain.gradients)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(gradients[name.removeprefix("base_model.model.")], gradient, rtol=1e-5, atol=1e-5, msg=name)
