"""Layers compiled by torch.compile, with g++ on a CPU, against uncompiled ones: steps, scores, changeovers, checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.trainer.backends.fsdp.shards import local_shards
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner
from tasuki.trainer.modules.compiled_blocks import num_graphs
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1 import loss_pb2
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import MemoryTag
from tests.extent import IS_WHOLE, only_whole
from tests.integration.learning import assert_equal, fsdp, learn, start_learner, trained, whole_gradients, whole_parameters
from tests.integration.trainer_process import TrainerProcess, connect, samples_of_now, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import CONFIGS, HYBRID, VOCAB_SIZE, make_model, save_checkpoint

# Enough steps for packings of every kind: one sequence and many, alike and not, one micro-batch and several.
NUM_STEPS = 50
MAX_TOKENS = 200
SETTINGS = {"learning_rate": 1e-3, "eps": 1e-3, "micro_batch_tokens": MAX_TOKENS}
# Our attention module and that of transformers, layers of two kinds, and experts; the rest runs in `make chaos`.
FIRST = {"gemma2": "full", "qwen3_moe": "attention"}
CASES = [
    pytest.param(kind, rung, marks=[] if FIRST.get(kind) == rung else only_whole)
    for kind in CONFIGS
    if kind not in HYBRID
    for rung in ("none", "attention", "full", "offloaded")
]
# Single steps differ by rounding; after NUM_STEPS the differences have grown with the weights.
CLOSE, GROWN = 1e-4, 2e-3


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State folder of a service that finds the other tests' compiled code there, since torch's probing of the machine takes longest."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module", autouse=True)
def mesh(state_dir: Path) -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(state_dir / "compiled-blocks"))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = CONFIGS if IS_WHOLE else (*FIRST, "qwen2")
    return {kind: save_checkpoint(make_model(kind, seed=0), folder / kind) for kind in kinds}


def start(model: Path, mesh: DeviceMesh, **settings: Any) -> Learner:
    """Starts a learner that compiles at its first steps, or at its warm-up."""
    return start_learner(model, mesh=mesh, compile="blocks", **SETTINGS | settings)


def samples_of(step: int) -> Samples:
    """Makes samples, some with a prompt so long that attention pads it in a separate group."""
    generator = np.random.default_rng(step)
    samples = make_samples(int(generator.integers(2, 14)), vocab_size=VOCAB_SIZE, seed=step, temperature=0.8)
    for sample in samples:
        if generator.random() < 0.2:
            sample.prompt_token_ids[:] = generator.integers(3, VOCAB_SIZE, size=int(generator.integers(60, 180))).tolist()
        sample.values[:] = [0.1] * len(sample.completion_token_ids)
        sample.returns[:] = generator.normal(size=len(sample.completion_token_ids)).tolist()
    return decode_samples(samples)


def step_of(learner: Learner, role: Role, step: int) -> tuple[float, dict[str, Tensor]]:
    """Makes a step; returns its loss and gradients."""
    config = LossConfig(loss=ValueLoss()) if role is Role.CRITIC else LossConfig(kl_coef=0.1)
    loss = learn(learner, role, samples_of(step), config=config, max_tokens=MAX_TOKENS).loss
    gradients = whole_gradients(learner, role)
    learner.optim_step(role)
    return loss, gradients


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float) -> None:
    """Compares tensors by the norm of their difference."""
    assert list(found) == list(expected)
    scale = max(float(tensor.norm()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= tolerance * (float(tensor.norm()) + 1e-3 * scale), name


@pytest.mark.parametrize(("kind", "rung"), CASES)
def test_steps_of_any_packing_are_equal_to_rounding_and_run_the_first_graphs(
    models: dict[str, Path], mesh: DeviceMesh, kind: str, rung: str
) -> None:
    plain, compiled = (
        start_learner(models[kind], mesh=mesh, checkpointing=rung, **SETTINGS),
        start(models[kind], mesh, checkpointing=rung),
    )
    num_first = 0
    for step in range(NUM_STEPS):
        (loss, gradients), (compiled_loss, compiled_gradients) = (
            step_of(learner, Role.POLICY, step) for learner in (plain, compiled)
        )
        num_first = num_first or num_graphs()
        tolerance = CLOSE if step == 0 else GROWN
        assert compiled_loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
        assert_close(compiled_gradients, gradients, tolerance=tolerance)
    assert num_graphs() == num_first
    assert_close(whole_parameters(compiled, Role.POLICY), whole_parameters(plain, Role.POLICY), tolerance=GROWN)
    if IS_WHOLE:
        batch = [token_batch(samples_of(9), device=torch.device("cpu"))]
        scores = [learner.score(Role.REFERENCE, batch)[0] for learner in (plain, compiled)]
        torch.testing.assert_close(scores[1], scores[0], rtol=CLOSE, atol=CLOSE)
    for learner in (plain, compiled):
        learner.backend.close()


def test_weights_that_left_and_came_back_and_a_checkpoint_are_the_same_to_compiled_layers(
    models: dict[str, Path], mesh: DeviceMesh, tmp_path: Path
) -> None:
    awake, sleeper = (start(models["qwen3_moe"], mesh) for _ in range(2))
    for step in range(3):
        loss, gradients = step_of(awake, Role.POLICY, step)
        sleeper.publish()
        fsdp(sleeper).publication.withdraw()
        sleeper.backend.memory.pause_tags([MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER])
        sleeper.backend.memory.resume_tags([MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER])
        slept_loss, slept_gradients = step_of(sleeper, Role.POLICY, step)
        assert slept_loss == loss
        assert_equal(slept_gradients, gradients)
    sleeper.save_checkpoint(tmp_path / "saved")
    plain = start_learner(models["qwen3_moe"], mesh=mesh, **SETTINGS)
    shards = [local_shards(trained(learner, Role.POLICY).network.get_submodule("causal_lm")) for learner in (plain, sleeper)]
    assert [shard.name for shard in shards[1]] == [shard.name for shard in shards[0]]
    plain.load_checkpoint(tmp_path / "saved")
    plain.save_checkpoint(tmp_path / "saved again")
    resumed = start(models["qwen3_moe"], mesh)
    resumed.load_checkpoint(tmp_path / "saved again")
    loss, gradients = step_of(awake, Role.POLICY, 3)
    resumed_loss, resumed_gradients = step_of(resumed, Role.POLICY, 3)
    assert resumed_loss == loss
    assert_equal(resumed_gradients, gradients)


def test_a_machine_without_a_compiler_is_told_at_the_start(
    models: dict[str, Path], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    learner = start(models["qwen2"], mesh)
    # monkeypatch would delete the setting in the end, for other tests of this process.
    with (
        inductor.patch("cpp.cxx", (None, "no-such-compiler")),
        pytest.raises(InvalidArgument, match=r'trainer.compile: "blocks" is not possible here: .*[Cc]\+\+ compiler') as refused,
    ):
        fsdp(learner).warm_up()
    assert refused.value.metadata["field"] == "trainer.compile"


@pytest.fixture(scope="module")
def trainers(
    models: dict[str, Path], state_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[TrainerProcess]]:
    """Trainers of one plain rank, one compiled rank and, in `make chaos`, two that share prompts and micro-batches and tile MLPs."""
    text = 'compute_dtype = "float32"\nlearning_rate = 1e-3\neps = 1e-3\nmicro_batch_tokens = 64\n'
    compiled = 'compile = "blocks"\n'
    shared = f"{compiled}prefix_sharing = true\nsequence_parallel = 2\nmlp_tile_tokens = 16\n"
    kinds = [(1, "", tmp_path_factory.mktemp("plain")), (1, compiled, state_dir)]
    kinds += [(2, shared, tmp_path_factory.mktemp("shared"))] if IS_WHOLE else []
    found = set(state_dir.rglob("*.so"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        # Not forked: torch reads these variables on import.
        trainers = [
            start_trainer(folder, models["qwen2"], num_ranks=num_ranks, settings=text + settings, inside=["env"])
            for num_ranks, settings, folder in kinds
        ]
    try:
        for trainer in trainers:
            trainer.wait_until_serving()
        # In `make chaos` the other tests have compiled all that the service needs.
        assert IS_WHOLE or found < set(state_dir.rglob("*.so"))
        yield trainers
    finally:
        for trainer in trainers:
            trainer.stop()


async def test_a_compiled_service_answers_as_one_that_is_not_and_compiles_before_it_serves(trainers: list[TrainerProcess]):
    answers, steps, scores = [], [], []
    for trainer in trainers:
        async with connect(trainer) as client:
            samples = await samples_of_now(client)
            answers.append(await client.forward_backward(samples, loss=loss_pb2.LossConfig(name="gspo")))
            steps.append(await client.optim_step())
            scores.append(await client.log_probs(samples))
        assert "event=compiled_late" not in trainer.log.read_text()
    for answer, step, rows in zip(answers[1:], steps[1:], scores[1:], strict=True):
        assert answer.loss == pytest.approx(answers[0].loss, rel=CLOSE, abs=CLOSE)
        assert step.grad_norm == pytest.approx(steps[0].grad_norm, rel=CLOSE)
        for mine, theirs in zip(rows, scores[0], strict=True):
            assert list(mine) == pytest.approx(list(theirs), abs=CLOSE)
