"""Steps of mixtures against transformers, with every two settings together that change how a layer is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasuki.models.known import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.models.shape import EXPERTS
from tasuki.trainer.modules.lora import in_file
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.types_pb2 import TrainingSample, VersionSpan
from tests.extent import IS_WHOLE, covering
from tests.integration import trainer_samples as plain
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, metric, start_learner, whole_gradients
from tests.integration.trainer_samples import PlainStep, plain_step_of
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.routes import balancing_loss, force, hidden_states

KINDS = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "qwen3_5_moe": {"num_experts": 8},
    **{kind: {"n_routed_experts": 8} for kind in ("glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
}
TARGETS = ["o_proj"]
LORA = {"rank": 4, "alpha": 8, "target_modules": TARGETS}
AUX_LOSS_COEF = 0.1
AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "expert_parallel": (False, True),
    "sequence_parallel": (1, 2),
    "lora": ("", "linear", "dora", "experts"),
    "is_replayed": (True, False),
    "prefix_sharing": (False, True),
    "checkpointing": ("none", "attention", "full", "offloaded"),
    "router_aux_loss_coef": (0.0, AUX_LOSS_COEF),
    "mlp_tile_tokens": (None, 5),
}


NUM_GROUPS, GROUP_SIZE = 4, 3


def routed_samples(shape: RouteShape) -> tuple[list[TrainingSample], list[NDArray[np.int64]]]:
    """Groups with one prompt each, drawn by two versions, and the experts of their tokens, [tokens - 1, sparse layers, K], at random."""
    samples = plain.make_samples(NUM_GROUPS * GROUP_SIZE, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    generator, routes = np.random.default_rng(7), list[NDArray[np.int64]]()
    num_chosen, num_layers = shape.experts_per_token, shape.num_layers

    def rows(num_tokens: int) -> NDArray[np.int64]:
        scores = generator.random((num_tokens, num_layers, shape.num_experts))
        return scores.argsort(-1)[..., :num_chosen]

    prompts = [(generator.integers(3, VOCAB_SIZE, size=12 + group), rows(12 + group)) for group in range(NUM_GROUPS)]
    for index, sample in enumerate(samples):
        token_ids, prompt_rows = prompts[index % NUM_GROUPS]
        num_tokens = len(sample.completion_token_ids)
        sample.prompt_token_ids[:] = token_ids.tolist()
        sample.policy_version = 0
        if num_tokens > 1:
            spans = ((1, 0), (num_tokens - 1, 0))
            sample.version_spans.extend(VersionSpan(num_tokens=num, policy_version=version) for num, version in spans)
        whole = np.concatenate([prompt_rows, rows(num_tokens - 1)])
        sample.routed_experts = whole.astype(shape.dtype).tobytes()
        routes.append(whole[:, shape.sparse_layers])
    return samples, routes


def run_steps(mesh: DeviceMesh, output: Path, cases: Sequence[dict[str, Any]]) -> None:
    for index, case in enumerate(cases):
        run_step(case, output=output / str(index), mesh=mesh)


def run_step(case: dict[str, Any], *, output: Path, mesh: DeviceMesh) -> None:
    """case: the model's folder, settings of [trainer], and whether the samples carry their experts."""
    learner, model = start_learner(Path(case["model"]), mesh=mesh, **case["settings"]), read_model_shape(Path(case["model"]))
    shape = RouteShape.of(model)
    assert shape is not None
    samples = decode_samples(routed_samples(shape)[0], routes=shape if case["is_replayed"] else None)
    # The auxiliary loss is over what all ranks compute at once.
    max_tokens = 4096 if "router_aux_loss_coef" in case["settings"] else 64
    report = learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=max_tokens)
    gradients = whole_gradients(learner, Role.POLICY)
    learner.backend.close()
    if dist.get_rank() == 0:
        save_file(gradients, output.with_suffix(".safetensors"))
        metrics = {name: metric(report, name) for name in report.metrics}
        output.with_suffix(".json").write_text(json.dumps({"loss": report.loss, "metrics": metrics}))


def is_possible(case: dict[str, Any]) -> bool:
    """Whether configurations may combine these settings, and the samples' micro-batches are those of `expected`."""
    if case["kind"] == "qwen3_5_moe" and (case["prefix_sharing"] or case["sequence_parallel"] > 1):
        return False
    if (case["kind"] == "gpt_oss" and case["lora"] == "experts") or (case["expert_parallel"] and case["mlp_tile_tokens"]):
        return False
    # Two ranks with samples of one prompt each compute it.
    return not (case["router_aux_loss_coef"] and case["prefix_sharing"] and case["sequence_parallel"] == 1)


POSSIBLE = [case for values in product(*AXES.values()) if is_possible(case := dict(zip(AXES, values, strict=True)))]
CASES = POSSIBLE if IS_WHOLE else covering(POSSIBLE, size=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, settings in KINDS.items():
        save_checkpoint(make_model(kind, seed=3, **settings), folder / kind)
        for adapter in AXES["lora"][1:]:
            if (kind, adapter) == ("gpt_oss", "experts"):
                continue
            torch.manual_seed(5)
            options: dict[str, Any] = {
                "target_parameters": list(EXPERTS) if adapter == "experts" else None,
                "use_dora": adapter == "dora",
            }
            config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)
            made = get_peft_model(loaded(folder / kind), config)
            for name, param in made.named_parameters():
                if "magnitude" in name:
                    param.data.mul_(torch.rand_like(param) + 0.5)
            made.save_pretrained(folder / f"{kind}-{adapter}")
    return folder


@pytest.fixture(scope="module")
def steps(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], Path]]:
    """Report and file of gradients of each case."""
    found: dict[int, tuple[dict[str, Any], Path]] = {}
    for first in range(0, len(CASES), 16):  # a launch has its own time limit
        output, some = tmp_path_factory.mktemp("steps"), CASES[first : first + 16]
        run_ranks(run_steps, output, [asked(models, case) for case in some], num_ranks=2)
        for index in range(len(some)):
            found[first + index] = json.loads((output / f"{index}.json").read_text()), output / f"{index}.safetensors"
    return found


def asked(models: Path, case: dict[str, Any]) -> dict[str, Any]:
    own = ("kind", "is_replayed", "lora")
    settings = {key: value for key, value in case.items() if key not in own and value is not None and value != 0.0}
    if lora := case["lora"]:
        path = str(models / f"{case['kind']}-{lora}")
        settings["lora"] = {**LORA, "path": path, "experts": lora == "experts", "use_dora": lora == "dora"}
    return {"model": str(models / case["kind"]), "is_replayed": case["is_replayed"], "settings": settings}


def loaded(folder: Path) -> PreTrainedModel:
    implementation = "eager" if folder.name == "gpt_oss" else "sdpa"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation)


@cache
def expected(
    folder: Path, adapter: str, *, is_replayed: bool, aux_loss_coef: float, is_shared: bool
) -> tuple[PlainStep, float]:
    """The step, and its auxiliary loss. is_shared: whether samples of one prompt compute it once."""
    shape = RouteShape.of(read_model_shape(folder))
    assert shape is not None
    samples, routes = routed_samples(shape)
    base = loaded(folder)
    if is_replayed:
        force(base, routes * 2)
    hidden = hidden_states(base)
    model: Any = PeftModel.from_pretrained(base, f"{folder}-{adapter}", is_trainable=True) if adapter else base
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for sample in samples:
        model(input_ids=torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]]))
    # The last token is no input, and a shared prompt counts once.
    firsts = [is_shared * (index >= NUM_GROUPS) * len(sample.prompt_token_ids) for index, sample in enumerate(samples)]
    hidden_LTH = [torch.cat([rows[first:-1] for rows, first in zip(each, firsts, strict=True)]) for each in hidden]
    routes_TLK = torch.cat([torch.from_numpy(rows[first:]) for rows, first in zip(routes, firsts, strict=True)])
    loss = balancing_loss(base, hidden_LTH, routes_TLK if is_replayed else None)
    slopes = torch.autograd.grad(aux_loss_coef * loss, list(trained.values()), allow_unused=True)
    plain = plain_step_of(model, samples)
    gradients = {
        name.removeprefix("base_model.model."): plain.gradients[name] + (0.0 if slope is None else slope)
        for name, slope in zip(trained, slopes, strict=True)
    }
    return replace(plain, gradients=gradients), loss.item()


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: "-".join(map(str, CASES[index].values())))
def test_a_step_equals_that_of_transformers(steps: dict[int, tuple[dict[str, Any], Path]], models: Path, index: int) -> None:
    (report, file), case = steps[index], CASES[index]
    plain, aux_loss = expected(
        models / case["kind"],
        case["lora"],
        is_replayed=case["is_replayed"],
        aux_loss_coef=case["router_aux_loss_coef"],
        is_shared=case["prefix_sharing"],
    )
    metrics, found = report["metrics"], dict[str, Tensor]()
    assert report["loss"] == pytest.approx(plain.loss, abs=1e-5)
    assert metrics["log_prob_gap"] == pytest.approx(plain.log_prob_gap, abs=1e-5)
    assert ("router_disagreement" in metrics) is case["is_replayed"]
    if case["is_replayed"]:
        assert 0.5 < metrics["router_disagreement"] < 1, "two of eight are drawn at random"
    if case["router_aux_loss_coef"]:
        assert metrics["router_aux_loss"] == pytest.approx(aux_loss, rel=1e-5)
    for name, gradient in load_file(file).items():
        peft_name, found_as = in_file(name, gradient) if name.endswith(("_lora_A", "_lora_B")) else (name, gradient)
        peft_name = peft_name.removeprefix("base_model.model.").replace("_A.weight", "_A.default.weight")
        found[peft_name.replace("_B.weight", "_B.default.weight")] = found_as
    assert found.keys() == plain.gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain.gradients[name], rtol=1e-5, atol=1e-5, msg=name)
