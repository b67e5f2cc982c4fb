"""Every family on a CPU in float32: the engine generates from what full training and adapters have made of it. Part of `make chaos`.

An engine starts for each family, and one more where it can serve adapters; the trainer is in this process.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tasuki.models.known import read_model_shape
from tasuki.trainer.backends.fsdp.model import correct_latent_norms
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.types_pb2 import Sample, TrainingSample
from tasuki.v1.weights_pb2 import PublishedWeights
from tests.integration.learning import fsdp, learn, start_learner
from tests.integration.one_rank import mesh
from tests.integration.rollout_process import (
    RolloutProcess,
    TestTrainer,
    connected,
    log_probs_of,
    serving_rollout,
)
from tests.integration.trainer_samples import LOSS
from tests.models import CONFIGS, IMAGE_TOKEN, make_model, save_checkpoint

__all__ = ["mesh"]
pytestmark = pytest.mark.timeout(600)

# SGLang's attention on a CPU does not cap logits, so rollout refuses to serve it there (tests/unit/test_rollout_model.py).
NEEDS_GPU = {"gemma2"}
KINDS = [kind for kind in CONFIGS if kind not in NEEDS_GPU]
# As in docs/reference/models.md and docs/guides/lora.md; of mixtures the adapters of attention.
SERVED = (
    "llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "mistral", "smollm3", "gemma3", "granite", "glm4_moe", "gpt_oss",
    "olmo2", "mixtral",
)  # fmt: skip
# Far from the epsilon that transformers leaves in two norms of latent attention.
CHANGES = {"glm4_moe_lite": {"rms_norm_eps": 1e-2}}
PROMPTS = [list(range(3, 20)), [40, 7], [90, 3, 3, 61, 8]]
TEMPERATURE = 0.7
# Of float32 log-probs, two roundings of those near 3.
TOLERANCE = 2e-5
# No engine takes a lower version than its last.
VERSIONS = count(1)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model(kind, seed=0, **CHANGES.get(kind, {})), tmp_path_factory.mktemp(kind) / "model")


@pytest.fixture(scope="module")
def rollout(folder: Path) -> Iterator[RolloutProcess]:
    with serving_rollout(folder.with_name("node"), folder, 'rollout.dtype="float32"') as process:
        yield process


@pytest.mark.parametrize("kind", KINDS, scope="module")
async def test_a_family_generates_as_transformers_scores(kind: str, rollout: RolloutProcess) -> None:
    prompts = PROMPTS
    # The second version finds nothing that the engine has computed from the first.
    for seed in (1, 2):
        version, model = next(VERSIONS), make_model(kind, seed=seed, **CHANGES.get(kind, {}))
        correct_latent_norms(model)
        trainer = TestTrainer(rollout.socket_dir, f"trainer-{version}", model, dtype=torch.float32)
        turns: list[tuple[list[int], Sample]] = []
        async with connected(rollout) as client:
            await client.wake(trainer.publish(version))
            # The second turn continues the first, of which the engine has cached prefixes and states. The first one of the second
            # version continues samples of the first.
            for _ in range(2):
                samples = await client.generate(
                    prompts, num_samples=2, max_new_tokens=12, temperature=TEMPERATURE, ignore_eos=True
                )
                turns += [(prompts[sample.prompt_index], sample) for sample in samples]
                plain = [sample for sample in samples if IMAGE_TOKEN not in sample.token_ids]
                prompts = [prompts[sample.prompt_index] + list(sample.token_ids) + [9] for sample in plain[:3]]
            await client.sleep()
        trainer.close()
        for prompt, sample in turns:
            theirs = log_probs_of(trainer.model, prompt, list(sample.token_ids), temperature=TEMPERATURE)
            torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), theirs, rtol=0, atol=4e-5)


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("kind", KINDS, scope="module")
async def test_a_family_generates_from_what_was_trained(
    has_adapters: bool, folder: Path, rollout: RolloutProcess, mesh: DeviceMesh, tmp_path: Path
) -> None:
    await _train(rollout, folder, mesh=mesh, lora=_adapters(folder) if has_adapters else None, output=tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "served", "init"),
    [*((kind, "adapter", "default") for kind in SERVED), ("qwen3", "adapter", "pissa"), ("qwen3", "merged", "pissa")],
    scope="module",
)
async def test_a_family_generates_with_an_adapter_that_was_trained(
    served: str, init: str, folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    lora = _adapters(folder, is_served=True) | {"init": init}
    settings = [f"rollout.lora={served}", *(f"trainer.lora.{key}={json.dumps(value)}" for key, value in lora.items())]
    with serving_rollout(tmp_path / "node", folder, 'rollout.dtype="float32"', *settings) as process:
        await _train(process, folder, mesh=mesh, lora=lora, output=tmp_path / "model", served=served)


def _adapters(folder: Path, *, is_served: bool = False) -> dict[str, Any]:
    """[trainer.lora] with every linear layer that can have an adapter."""
    shape = read_model_shape(folder)
    linear = {name for layer in range(shape.num_layers) for name in shape.linear_layers(layer)}
    experts = bool(shape.num_experts) and not is_served and shape.architecture != "GptOssForCausalLM"
    return {"rank": 4, "target_modules": sorted(linear), "experts": experts}


async def _train(
    rollout: RolloutProcess,
    folder: Path,
    *,
    mesh: DeviceMesh,
    lora: dict[str, Any] | None,
    output: Path,
    served: str = "merged",
) -> None:
    """Takes two steps of GRPO at a high learning rate. Compares what the engine generates before, between and after with the trainer's
    log-probs, in the end with those of the exported model and its adapter.
    """
    table = {"dtype": "float32", "lora": served}
    learner = start_learner(folder, mesh=mesh, state_dir=rollout.state_dir, rollout=table, lora=lora, learning_rate=1e-2)
    samples: list[TrainingSample] = []
    try:
        for step in range(3):
            if step:
                learn(learner, Role.POLICY, decode_samples(samples), config=replace(LOSS, kl_coef=0.0))
                learner.optim_step(Role.POLICY)
            async with connected(rollout) as client:
                version = next(VERSIONS)
                handle = fsdp(learner).publication.publish(version).handle
                await client.wake(PublishedWeights(policy_version=version, boot_id=str(output), handles=[handle]))
                settings = {"num_samples": 4, "max_new_tokens": 12, "temperature": TEMPERATURE, "ignore_eos": True}
                made = await client.generate(PROMPTS, **settings)
                samples = [_graded(sample, learner.policy_version) for sample in made if IMAGE_TOKEN not in sample.token_ids]
                await client.sleep()
            batch = token_batch(decode_samples(samples), device=learner.backend.device)
            found = torch.tensor([value for sample in samples for value in sample.rollout_log_probs])
            torch.testing.assert_close(found, learner.score(Role.POLICY, [batch])[0], rtol=0, atol=TOLERANCE)
        fsdp(learner).export_model(output)
    finally:
        fsdp(learner).close()
    exported, start = _load(output), _load(folder)
    assert _gap(start, samples) > 0.01, "training has moved what is sampled"
    assert _gap(exported, samples) < TOLERANCE
    if lora is not None:
        adapter = load_file(output / "adapter" / "adapter_model.safetensors")
        assert {name: bool(tensor.any()) for name, tensor in adapter.items()} == dict.fromkeys(adapter, True)
        assert _gap(PeftModel.from_pretrained(start, output / "adapter"), samples) < TOLERANCE


def _graded(sample: Sample, version: int) -> TrainingSample:
    return TrainingSample(
        prompt_token_ids=PROMPTS[sample.prompt_index],
        completion_token_ids=sample.token_ids,
        rollout_log_probs=sample.rollout_log_probs,
        advantages=[1.0 if len({*sample.token_ids}) % 2 else -1.0],
        policy_version=version,
        temperature=TEMPERATURE,
    )


def _load(folder: Path) -> Any:
    """transformers' model of a folder."""
    has_tower = read_model_shape(folder).tower is not None
    model: Any = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32
    )
    correct_latent_norms(model)
    return model.eval()


def _gap(model: Any, samples: list[TrainingSample]) -> float:
    """The largest difference between a model's log-probs and rollout's."""
    gaps: list[float] = []
    for sample in samples:
        prompt, completion = list(sample.prompt_token_ids), list(sample.completion_token_ids)
        found = log_probs_of(model, prompt, completion, temperature=TEMPERATURE)
        gaps.append((found - torch.tensor(sample.rollout_log_probs)).abs().max().item())
    return max(gaps)
