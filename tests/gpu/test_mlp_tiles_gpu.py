"""Tiled MLPs on a GPU: gradients up to rounding, and less memory.

Needs `make native` and a CUDA GPU.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.micro_batch import MicroBatch
from tasuki.trainer.learner import Learner
from tasuki.trainer.wire import Role
from tests.gpu.test_checkpointing_gpu import MAX_TOKENS, samples_of
from tests.integration.learning import micro_batches, start_learner, whole_gradients, with_denominator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

TILE_TOKENS, NUM_LAYERS, WIDTH, HIDDEN = 1024, 8, 2816, 1024
# Relative error in norm, in bfloat16: a weight's gradient is rounded after each tile, and other shapes may use other kernels.
TOLERANCE = 0.03


def step(learner: Learner) -> tuple[list[MicroBatch], dict[str, Tensor], int]:
    """Makes a step; returns its micro-batches, gradients, and the peak bytes of a call above those before it."""
    samples = samples_of(0)
    config = with_denominator(LossConfig(), samples)
    batches = micro_batches(learner, samples, config=config, max_tokens=MAX_TOKENS)
    learner.forward_backward(Role.POLICY, batches, config=config)
    learner.discard_gradients(Role.POLICY)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    learner.forward_backward(Role.POLICY, batches, config=config)
    torch.cuda.synchronize()
    return batches, whole_gradients(learner, Role.POLICY), torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("rung", ["none", "attention", "full"])
def test_tiles_take_less_memory_and_compute_the_same(model: Path, mesh: DeviceMesh, rung: str) -> None:
    found: list[tuple[list[MicroBatch], dict[str, Tensor], int]] = []
    for tile_tokens in (None, TILE_TOKENS):
        learner = start_learner(
            model,
            mesh=mesh,
            checkpointing=rung,
            mlp_tile_tokens=tile_tokens,
            compute_dtype="bfloat16",
            micro_batch_tokens=MAX_TOKENS,
        )
        found.append(step(learner))
        learner.backend.close()
    (batches, expected, whole_bytes), (_, tiled, tiled_bytes) = found
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((tiled[name] - gradient).norm()) <= TOLERANCE * (float(gradient.norm()) + 1e-2 * scale), name
    if rung == "none":
        num_tokens = max(batch.tokens.input_ids_T.numel() for batch in batches)
        # Gate, up and their product in each layer; tiles keep their input, and one tile keeps everything.
        inside, hidden = 3 * WIDTH * 2, HIDDEN * 2
        saved = NUM_LAYERS * num_tokens * (inside - hidden) - TILE_TOKENS * inside
        assert whole_bytes - tiled_bytes >= 0.8 * saved, (whole_bytes, tiled_bytes, saved)
