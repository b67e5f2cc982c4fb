"""Steps with given experts against transformers with the same, in every combination of what changes how a layer is computed."""

from __future__ import annotations

import json
from dataclasses import replace
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
from tasuki.models.shape import EXPERTS
from tasuki.trainer.backends.fsdp.lora.adapters import in_file
from tests.extent import IS_WHOLE, crossed
from tests.integration.launched import run_ranks
from tests.integration.replayed_ranks import routed_samples
from tests.integration.trainer_samples import PlainStep, plain_step_of
from tests.models import make_model, save_checkpoint
from tests.routes import force

KINDS = {"qwen3_moe": {"num_experts": 8}, "mixtral": {"num_local_experts": 8}, "glm4_moe": {"n_routed_experts": 8}}
TARGETS = ["q_proj", "v_proj"]
LORA = {"rank": 4, "alpha": 8, "target_modules": TARGETS}
ADAPTERS = ("", "linear", "experts")


def combinations(num_ranks: int) -> list[dict[str, Any]]:
    """Settings of [trainer], with the kind of adapters."""
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
            [(lora, sharing) for lora in ADAPTERS for sharing in (False, True)], ("none", "attention", "full", "offloaded")
        )
    ]
    tiled = {**found[0], "mlp_tile_tokens": 5}
    return [*found, tiled]


CASES = [
    (kind, num_ranks, json.dumps(settings))
    for kind in (KINDS if IS_WHOLE else ("glm4_moe",))
    for num_ranks in ((1, 2) if IS_WHOLE else (2,))
    for settings in combinations(num_ranks)[:: 1 if IS_WHOLE else 4]
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, settings in KINDS.items():
        save_checkpoint(make_model(kind, seed=3, **settings), folder / kind)
        for adapter, experts in (("linear", None), ("experts", list(EXPERTS))):
            torch.manual_seed(5)
            config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, target_parameters=experts, init_lora_weights=False)
            get_peft_model(loaded(folder / kind), config).save_pretrained(folder / f"{kind}-{adapter}")
    return folder


@pytest.fixture(scope="module")
def steps(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[dict[str, Any], Path]]:
    """Report and file of gradients, by family and settings."""
    found: dict[tuple[str, str], tuple[dict[str, Any], Path]] = {}
    for kind, num_ranks in sorted({case[:2] for case in CASES}):
        output = tmp_path_factory.mktemp("steps")
        asked = {settings_of(models, kind, case[2]): case[2] for case in CASES if case[:2] == (kind, num_ranks)}
        for some in (list(asked)[first : first + 16] for first in range(0, len(asked), 16)):  # a launch has its own time limit
            run_ranks("replayed_ranks.py", output, models / kind, *some, num_ranks=num_ranks)
        for file in output.glob("*.json"):
            report = json.loads(file.read_text())
            found[kind, f"{num_ranks} {asked[report['settings']]}"] = report, file.with_suffix(".safetensors")
    return found


def settings_of(models: Path, kind: str, settings: str) -> str:
    given = json.loads(settings)
    if lora := given.pop("lora"):
        given["lora"] = {**LORA, "path": str(models / f"{kind}-{lora}"), "experts": lora == "experts"}
    return json.dumps(given)


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@cache
def expected(folder: Path, adapter: str) -> PlainStep:
    shape = RouteShape.of(read_model_shape(folder))
    assert shape is not None
    samples, routes = routed_samples(shape)
    base = loaded(folder)
    force(base, routes)
    if not adapter:
        return plain_step_of(base, samples)
    plain = plain_step_of(PeftModel.from_pretrained(base, f"{folder}-{adapter}", is_trainable=True), samples)
    return replace(plain, gradients={name.removeprefix("base_model.model."): each for name, each in plain.gradients.items()})


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
    for name, gradient in gradients.items():
        peft_name, found = in_file(name, gradient) if name.endswith(("_lora_A", "_lora_B")) else (name, gradient)
        peft_name = peft_name.removeprefix("base_model.model.").replace("_A.weight", "_A.default.weight")
        peft_name = peft_name.replace("_B.weight", "_B.default.weight")
        torch.testing.assert_close(found, plain.gradients[peft_name], rtol=1e-5, atol=1e-5, msg=name)
