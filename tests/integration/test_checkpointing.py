"""Activation checkpointing on a learner of one rank: memory and recomputation differ, gradients do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.planner.node import Checkpointing
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument
from tests.extent import IS_WHOLE
from tests.integration.learning import assert_equal, learn, start_learner, whole_gradients, whole_parameters
from tests.integration.one_rank import mesh
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.operators import CountedOperators

__all__ = ["mesh"]

NUM_LAYERS = 4
# Longer than the sequences that a CPU attends to by plain products.
LENGTHS = (300, 270, 40)
MAX_TOKENS = 320
# In `make test` every rung takes a sample of the steps.
NUM_STEPS = 50 if IS_WHOLE else 3
RUNGS = tuple(Checkpointing)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 512}
    return save_checkpoint(make_model("llama", seed=0, **sizes), tmp_path_factory.mktemp("model") / "llama")


def samples_of(step: int) -> Samples:
    generator = np.random.default_rng(step)
    samples: list[TrainingSample] = []
    for length in LENGTHS:
        tokens, half = generator.integers(VOCAB_SIZE, size=length).tolist(), length // 2
        samples.append(
            TrainingSample(
                prompt_token_ids=tokens[:-half],
                completion_token_ids=tokens[-half:],
                rollout_log_probs=[-5.0] * half,
                advantages=generator.normal(size=half).tolist(),
                values=[0.0] * half,
                returns=generator.normal(size=half).tolist(),
            )
        )
    return decode_samples(samples)


def start(model: Path, mesh: DeviceMesh, rung: Checkpointing, **settings: Any) -> Learner:
    settings = {"learning_rate": 1e-3, "micro_batch_tokens": MAX_TOKENS} | settings
    return start_learner(model, mesh=mesh, checkpointing=str(rung), **settings)


def gradients_of(learner: Learner, role: Role, samples: Samples) -> dict[str, Tensor]:
    config = LossConfig() if role is Role.POLICY else LossConfig(loss=ValueLoss())
    learn(learner, role, samples, config=config, max_tokens=MAX_TOKENS)
    return whole_gradients(learner, role)


def test_no_choice_changes_a_bit_of_a_gradient(model: Path, mesh: DeviceMesh) -> None:
    kept = [*((rung, NUM_LAYERS - 1) for rung in RUNGS[1:]), (Checkpointing.OFFLOADED, NUM_LAYERS)]
    learners = [start(model, mesh, rung) for rung in RUNGS]
    learners += [start(model, mesh, rung, choices={"kept_layers": kept_layers}) for rung, kept_layers in kept]
    for step in range(NUM_STEPS):
        samples = samples_of(step)
        expected, *others = (gradients_of(learner, Role.POLICY, samples) for learner in learners)
        assert any(gradient.any() for gradient in expected.values())
        for found in others:
            assert_equal(found, expected)
        for learner in learners:
            learner.optim_step(Role.POLICY)
    expected, *others = (whole_parameters(learner, Role.POLICY) for learner in learners)
    for found in others:
        assert_equal(found, expected)


def test_no_choice_changes_a_bit_of_adapter_or_critic_gradients(model: Path, mesh: DeviceMesh) -> None:
    learners = [start(model, mesh, rung, lora={"rank": 4}, critic={}) for rung in RUNGS]
    for step in range(2):
        for role in (Role.POLICY, Role.CRITIC):
            expected, *others = (gradients_of(learner, role, samples_of(step)) for learner in learners)
            for found in others:
                assert_equal(found, expected)
            for learner in learners:
                learner.optim_step(role)


@pytest.mark.parametrize(("rung", "runs"), list(zip(RUNGS, (1, 1, 2, 1), strict=True)))
def test_attention_runs_again_in_backward_only_where_it_is_not_kept(
    model: Path, mesh: DeviceMesh, rung: Checkpointing, runs: int
) -> None:
    learner = start(model, mesh, rung)
    with CountedOperators() as counted:
        gradients_of(learner, Role.POLICY, samples_of(0).select([0]))
    assert counted.runs[ATTENTION] == runs * NUM_LAYERS


def test_scores_keep_nothing_and_do_not_disturb_a_step(model: Path, mesh: DeviceMesh) -> None:
    learner = start(model, mesh, Checkpointing.OFFLOADED)
    batches = [token_batch(samples_of(1), device=learner.backend.device)]
    before = [score_N.clone() for score_N in learner.score(Role.POLICY, batches)]
    expected = gradients_of(start(model, mesh, Checkpointing.NONE), Role.POLICY, samples_of(0))
    assert_equal(gradients_of(learner, Role.POLICY, samples_of(0)), expected)
    assert torch.equal(learner.score(Role.POLICY, batches)[0], before[0])


def test_a_host_without_room_for_the_inputs_is_told_at_the_start(model: Path, mesh: DeviceMesh) -> None:
    num_tokens = 2 * 10**9
    # Three layers with 64 float32 numbers per token, and again with one for each of 4 heads for both calls of attention.
    needed_bytes = 3 * num_tokens * (64 + 2 * (64 + 4)) * 4
    with pytest.raises(InvalidArgument, match=f'trainer.checkpointing: "offloaded" needs {needed_bytes} bytes') as refused:
        start(model, mesh, Checkpointing.OFFLOADED, micro_batch_tokens=num_tokens)
    assert refused.value.metadata == {"field": "trainer.checkpointing", "needed_bytes": str(needed_bytes)}
