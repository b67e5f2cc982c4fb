"""Experts of the trainer's own old policy (R2): its pass reports them, and every step on its samples passes them again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasuki.client import LossConfig, OldPolicy, TrainingSample
from tasuki.client.encode import training_sample_from_proto
from tasuki.models.known import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.v1.types_pb2 import VersionSpan
from tests.integration.test_trainer_client import NO_CORRECTION, client_of
from tests.integration.trainer_process import TrainerClient, connect, serving_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.refusal import refused
from tests.routes import own_routes

GIVEN = LossConfig(old_policy=OldPolicy.GIVEN, correction=NO_CORRECTION)
COMMON = 'compute_dtype = "float32"\nmicro_batch_tokens = 64\nrouter_replay = "old_policy"\n'
LORA = 'lora = { rank = 4, experts = true, target_modules = ["q_proj", "o_proj"] }\n'
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "qwen3_moe": ({"num_experts": 8}, LORA + 'expert_parallel = true\nprefix_sharing = true\ncheckpointing = "full"\n', 0.1),
    "deepseek_v3": (
        {"n_routed_experts": 8, "num_hidden_layers": 3},
        'sequence_parallel = 2\ncheckpointing = "attention"\nmlp_tile_tokens = 5\nprefix_sharing = true\n',
        3e-2,
    ),
    "qwen3_moe-megatron": (
        {"num_experts": 8, "vocab_size": 132},
        'backend = "megatron"\nmegatron = { tensor_parallel = 2, expert_parallel = 2 }\ncheckpointing = "full"\n',
        3e-2,
    ),
    "qwen3_5_moe": ({"num_experts": 8}, 'expert_parallel = true\ncheckpointing = "attention"\n', 3e-2),
    "mixtral": ({"num_local_experts": 300}, 'checkpointing = "none"\n', 1e-3),
}
"""Settings of the model and of [trainer], and a learning rate that moves routes in one step."""
NUM_GROUPS, GROUP_SIZE = 4, 3


@dataclass(frozen=True)
class Case:
    model: Path
    client: TrainerClient
    learning_rate: float


@pytest.fixture(scope="module", params=CASES)
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, float]]:
    sizes, settings, rate = CASES[request.param]
    if "megatron" in request.param:
        pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("node")
    model = save_checkpoint(make_model(request.param.partition("-")[0], seed=3, **sizes), folder / "model")
    with serving_trainer(folder / "node", model, num_ranks=2, settings=COMMON + settings) as trainer:
        yield model, trainer, rate


@pytest.fixture
async def case(process: tuple[Path, Any, float]) -> AsyncIterator[Case]:
    model, trainer, rate = process
    async with connect(trainer) as client:
        yield Case(model, client, rate)


def grouped_samples() -> list[TrainingSample]:
    """Groups of one prompt, whose tokens are of several versions."""
    samples = make_samples(NUM_GROUPS * GROUP_SIZE, vocab_size=VOCAB_SIZE)
    for index, sample in enumerate(samples):
        sample.prompt_token_ids[:] = samples[index % NUM_GROUPS].prompt_token_ids
        if (num_tokens := len(sample.completion_token_ids)) > 1:
            spans = ((1, 0), (num_tokens - 1, 0))
            sample.version_spans.extend(VersionSpan(num_tokens=num, policy_version=version) for num, version in spans)
    return [training_sample_from_proto(sample) for sample in samples]


def same(ones: list[Any], others: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


async def test_every_step_on_the_samples_passes_the_experts_of_the_old_policy(case: Case) -> None:
    own, shape = client_of(case.client), RouteShape.of(read_model_shape(case.model))
    assert shape is not None
    samples, everything = grouped_samples(), range(NUM_GROUPS * GROUP_SIZE)
    error = await refused(own.forward_backward([replace(one, old_log_probs=one.rollout_log_probs) for one in samples], GIVEN))
    assert error.metadata["field"] == "samples[0].routed_experts"
    olds = await own.with_old_log_probs(samples)
    plain = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    for old in olds:
        rows = shape.read(np.asarray(old.routed_experts).tobytes())
        expected = own_routes(plain, [*old.prompt_token_ids, *old.completion_token_ids])
        found = rows.reshape(-1, shape.num_layers, shape.experts_per_token)[:, shape.sparse_layers]
        np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    first = await own.forward_backward(olds, GIVEN, log_probs_of=everything)
    assert same([one.log_probs for one in first.log_probs], [old.old_log_probs for old in olds])
    assert first.metrics["ratio"] == first.metrics["ratio_max"] == 1.0 and first.metrics["router_disagreement"] == 0.0
    await own.optim_step(learning_rate=case.learning_rate)
    later = await own.forward_backward(olds, GIVEN, log_probs_of=everything)
    await own.discard_gradients()
    assert later.metrics["ratio_max"] > 1.0 and 0.0 < later.metrics["router_disagreement"] < 1.0
    replayed = await own.compute_log_probs(olds)
    assert same([one.log_probs for one in later.log_probs], replayed)
    assert not same(replayed, await own.compute_log_probs(samples))
    again = await own.with_old_log_probs(olds)
    assert not same([old.routed_experts for old in again], [old.routed_experts for old in olds])
