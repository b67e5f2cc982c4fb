"""Compiled layers on a GPU against uncompiled ones: every rung, adapters, packings, and weights that return during computation.

Needs `make native` and a CUDA GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.planner.node import Checkpointing
from tasuki.trainer.learner import Learner
from tasuki.trainer.modules.compiled_blocks import num_graphs
from tasuki.trainer.wire import Role
from tasuki.wire.stages import MemoryTag
from tests.gpu.test_checkpointing_gpu import MAX_TOKENS, samples_of
from tests.integration.learning import fsdp, learn, start_learner, whole_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NUM_STEPS = 50
# Relative error in norm: both round to bfloat16, at different points.
TOLERANCE = 0.05


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@contextmanager
def started(model: Path, mesh: DeviceMesh, kind: str, **settings: Any) -> Iterator[Learner]:
    """Starts one learner at a time, since each serves its export at the same address."""
    settings = {"compute_dtype": "bfloat16", "learning_rate": 1e-4, "micro_batch_tokens": MAX_TOKENS, **settings}
    learner = start_learner(model, mesh=mesh, compile=kind, **settings)
    try:
        fsdp(learner).warm_up()
        yield learner
    finally:
        learner.backend.close()


def gradients_of(learner: Learner, step: int) -> dict[str, Tensor]:
    learn(learner, Role.POLICY, samples_of(step), config=LossConfig(), max_tokens=MAX_TOKENS)
    return whole_gradients(learner, Role.POLICY)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    scale = max(float(tensor.norm()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= TOLERANCE * (float(tensor.norm()) + 1e-2 * scale), name


@pytest.mark.parametrize("rung", list(Checkpointing))
@pytest.mark.parametrize("lora", [None, {"rank": 16}], ids=["full", "lora"])
def test_first_gradients_are_equal_to_rounding(model: Path, mesh: DeviceMesh, rung: Checkpointing, lora: dict[str, int] | None):
    found = {}
    for kind in ("none", "blocks"):
        with started(model, mesh, kind, checkpointing=str(rung), lora=lora) as learner:
            gradients_of(learner, 0)  # before the step, an adapter's B is zero and A has no gradient
            learner.optim_step(Role.POLICY)
            found[kind] = gradients_of(learner, 1)
    assert_close(found["blocks"], found["none"])


def test_differently_packed_steps_compile_nothing_more(model: Path, mesh: DeviceMesh) -> None:
    with started(model, mesh, "blocks", checkpointing="none") as learner:
        num_first = num_graphs()
        for step in range(NUM_STEPS):
            gradients_of(learner, step)
            learner.optim_step(Role.POLICY)
        assert num_graphs() == num_first


def test_a_compiled_layer_waits_for_the_weights_that_it_reads(model: Path, mesh: DeviceMesh) -> None:
    with started(model, mesh, "blocks", checkpointing="none") as learner:
        expected = gradients_of(learner, 0)
        for _ in range(4):
            learner.discard_gradients(Role.POLICY)
            assert learner.backend.memory.pause_tags([MemoryTag.WEIGHTS], makes_room=True) > 0
            torch.full((1 << 30,), torch.nan, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            learner.backend.memory.resume_tags([MemoryTag.WEIGHTS])
            found = gradients_of(learner, 0)
            assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
