"""Experts that a real engine reports: those of transformers, of the weights that are served, for cached prefixes and cut samples too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tasuki.models.known import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.v1 import types_pb2
from tests.extent import only_whole
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    asleep,
    serving_rollout,
    start_samples,
)
from tests.models import make_model, save_checkpoint
from tests.routes import own_routes

PROMPTS = [list(range(3, 60)), [5, 6, 7]]


GLM = {"n_routed_experts": 8, "num_hidden_layers": 3}
KINDS = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "qwen3_5_moe": {"num_experts": 8},
    "qwen3_next": {"num_experts": 8},
    "glm4_moe_lite": {"n_routed_experts": 8},
    "glm4_moe": GLM,
    "deepseek_v2": GLM,
    "deepseek_v3": GLM,
}
"""The first layer of GLM and DeepSeek is dense."""


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=only_whole if kind == "qwen3_next" else ()) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model(kind, seed=0, **KINDS[kind]), tmp_path_factory.mktemp("model") / kind)


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    settings = ("rollout.dtype=float32",)
    with serving_rollout(tmp_path_factory.mktemp("node"), model, *settings) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def trainer(process: RolloutProcess, kind: str) -> Iterator[TestTrainer]:
    model = make_model(kind, seed=1, **KINDS[kind])
    trainer = TestTrainer(process.socket_dir, "trainer", model, dtype=torch.float32)
    yield trainer
    trainer.close()


@pytest.fixture
async def rollout(process: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with asleep(process) as client:
        yield client


def check_routes(sample: types_pb2.Sample, prompt: list[int], trainer: TestTrainer, model: Path) -> None:
    """Sparse layers have transformers' experts, in its order."""
    shape = RouteShape.of(read_model_shape(model))
    assert shape is not None and sample.route_bytes == shape.token_bytes == shape.num_layers * 2
    rows = shape.read(sample.routed_experts)
    found = rows.reshape(-1, shape.num_layers, 2)[:, shape.sparse_layers]
    expected = own_routes(trainer.model, [*prompt, *sample.token_ids])
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    assert shape.fault(rows) is None


async def test_experts_are_those_of_the_served_weights_with_cached_prefixes_and_after_a_sync(
    rollout: RolloutClient, trainer: TestTrainer, model: Path
) -> None:
    for version in (1, 2):
        await rollout.wake(trainer.publish(version))
        for _ in range(2):
            for sample in await rollout.generate(PROMPTS, num_samples=3, max_new_tokens=9, ignore_eos=True):
                check_routes(sample, PROMPTS[sample.prompt_index], trainer, model)
        await rollout.sleep()
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1).add_(0.03 * torch.randn_like(parameter))


async def test_a_cut_sample_has_the_experts_of_its_tokens(rollout: RolloutClient, trainer: TestTrainer, model: Path) -> None:
    await rollout.wake(trainer.publish(9))
    call = await start_samples(rollout, num_samples=3)
    await rollout.drain()
    samples = await call
    assert any(sample.token_ids for sample in samples)
    for sample in samples:
        if sample.token_ids:
            check_routes(sample, [5, 6], trainer, model)
        else:
            assert not sample.routed_experts
