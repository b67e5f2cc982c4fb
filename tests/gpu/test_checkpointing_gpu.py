"""Activation checkpointing on a GPU: gradients are equal bit for bit, while layer inputs are copied to the host and back.

Needs `make native` and a CUDA GPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.planner.node import Checkpointing
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.types_pb2 import TrainingSample
from tests.gpu.conftest import VOCAB_SIZE
from tests.integration.learning import learn, start_learner, whole_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MAX_TOKENS, NUM_STEPS = 8192, 50
RUNGS = {"none": "none", "none once more": "none"} | {str(rung): str(rung) for rung in list(Checkpointing)[1:]}
"""Checkpointing by case; "none once more" shows that the kernels themselves are deterministic."""


def samples_of(step: int) -> Samples:
    """Makes sequences so short that their gradients are sums of one tile, in one order. No heads share keys, for the same reason."""
    generator = np.random.default_rng(step)
    samples: list[TrainingSample] = []
    for length in generator.integers(10, 64, size=300):
        tokens, half = generator.integers(VOCAB_SIZE, size=length).tolist(), int(length) // 2
        samples.append(
            TrainingSample(
                prompt_token_ids=tokens[:-half],
                completion_token_ids=tokens[-half:],
                rollout_log_probs=[-8.0] * half,
                advantages=generator.normal(size=half).tolist(),
            )
        )
    return decode_samples(samples)


def test_no_choice_changes_a_bit_of_a_gradient(model: Path, mesh: DeviceMesh) -> None:
    settings = {"compute_dtype": "bfloat16", "learning_rate": 1e-4, "micro_batch_tokens": MAX_TOKENS}
    learners = {name: start_learner(model, mesh=mesh, checkpointing=rung, **settings) for name, rung in RUNGS.items()}
    for step in range(NUM_STEPS):
        samples, gradients = samples_of(step), {}
        for rung, learner in learners.items():
            learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=MAX_TOKENS)
            gradients[rung] = whole_gradients(learner, Role.POLICY)
            learner.optim_step(Role.POLICY)
        expected = gradients.pop("none")
        for rung, found in gradients.items():
            different = [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]
            assert not different, f"step {step}, {rung}: {different}"
    for learner in learners.values():
        # Host memory that stays pinned cannot be pinned by the next test.
        learner.backend.close()
