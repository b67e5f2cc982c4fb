"""The megatron-core backend beside the FSDP one: the same steps, weights, checkpoints and folders, however the ranks are laid out."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.weights.imported_weights import import_weights
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, start_learner, whole_parameters
from tests.integration.trainer_samples import LOSS, TEMPERATURE, make_samples
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

# Divisible by the number of tensor-parallel ranks, and large enough for the tokenizer.
VOCAB_SIZE = 132
KINDS = ("qwen3", "qwen2_tied", "llama")
LAYOUTS = {(1, 1): KINDS, (2, 2): KINDS, (2, 1): ("qwen3",), (4, 2): ("qwen3",)}
"""Families by ranks, and tensor-parallel ranks."""
# Small gradients, divided by the root of their square, would amplify rounding with a small eps.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
NUM_STEPS = 3


def start(model: Path, *, mesh: DeviceMesh, tensor_parallel: int | None, **more: Any) -> Learner:
    if tensor_parallel is not None:
        more |= {"backend": "megatron", "megatron": {"tensor_parallel": tensor_parallel}}
    return start_learner(model, mesh=mesh, **SETTINGS | more)


def parameters(learner: Learner) -> dict[str, Tensor]:
    """Every parameter in float32, on rank 0; every rank must call it."""
    if not hasattr(learner.backend, "_whole_tensors"):
        return whole_parameters(learner, Role.POLICY)
    return {name: each for one in cast(Any, learner.backend)._whole_tensors(torch.float32) for name, each in one.items()}


def steps(learner: Learner, num_steps: int, *, seed: int = 0) -> list[dict[str, float]]:
    samples = decode_samples(make_samples(17, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE))
    facts: list[dict[str, float]] = []
    for _ in range(num_steps):
        report = learn(learner, Role.POLICY, samples, config=LOSS, max_tokens=64)
        metrics = {name: part.total for name, part in report.metrics.items()}
        facts.append({"loss": report.loss, **metrics, "grad_norm": learner.optim_step(Role.POLICY).grad_norm})
    return facts


def run_steps(mesh: DeviceMesh, output: Path, cases: Sequence[tuple[Path, int | None]]) -> None:
    for model, tensor_parallel in cases:
        learner = start(model, mesh=mesh, tensor_parallel=tensor_parallel)
        facts = steps(learner, NUM_STEPS)
        tensors = parameters(learner)
        if dist.get_rank() == 0:
            stem = f"{model.name}-{mesh.size()}-{tensor_parallel}"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / f"{stem}.safetensors")
            (output / f"{stem}.json").write_text(json.dumps(facts))
        learner.backend.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_checkpoint(make_model(kind, seed=3, vocab_size=VOCAB_SIZE), folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def fsdp_steps(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("steps")
    run_ranks(run_steps, output, [(model, None) for model in models.values()], num_ranks=1)
    return output


@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), LAYOUTS)
def test_steps_are_those_of_fsdp(fsdp_steps: Path, models: dict[str, Path], num_ranks: int, tensor_parallel: int) -> None:
    kinds = LAYOUTS[num_ranks, tensor_parallel]
    run_ranks(run_steps, fsdp_steps, [(models[kind], tensor_parallel) for kind in kinds], num_ranks=num_ranks)
    for kind in kinds:
        ours, theirs = (fsdp_steps / f"{kind}-{layout}" for layout in (f"{num_ranks}-{tensor_parallel}", "1-None"))
        found, expected = (json.loads(stem.with_suffix(".json").read_text()) for stem in (ours, theirs))
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
        assert min(step["grad_norm"] for step in expected) > SETTINGS["max_grad_norm"], "every step is clipped"
        weights, others = (load_file(stem.with_suffix(".safetensors")) for stem in (ours, theirs))
        assert weights.keys() == others.keys()
        for name, tensor in others.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=f"{kind}: {name}")


def run_checkpoints(mesh: DeviceMesh, model: Path, output: Path, tensor_parallel: int | None) -> None:
    """Saves after one step, goes on, and starts again from the file; rank 0 writes the parameters after each second step."""
    learner = start(model, mesh=mesh, tensor_parallel=tensor_parallel)
    stem = f"{mesh.size()}-{tensor_parallel}"
    steps(learner, 1)
    learner.save_checkpoint(output / f"checkpoint-{stem}")
    learner.backend.export_model(output / f"model-{stem}")
    steps(learner, 1)
    straight = parameters(learner)
    learner.backend.close()
    for saved in sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")):
        learner = start(model, mesh=mesh, tensor_parallel=tensor_parallel)
        learner.load_checkpoint(output / f"checkpoint-{saved}")
        assert learner.policy_version == 1
        steps(learner, 1)
        resumed = parameters(learner)
        if dist.get_rank() == 0:
            for name, tensor in straight.items():
                tolerance = 0.0 if saved == stem else 2e-6
                torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=tolerance, msg=f"{saved} at {stem}: {name}")
        learner.backend.close()


def test_checkpoints_continue_a_run_in_any_layout_and_backend(models: dict[str, Path], tmp_path: Path) -> None:
    for num_ranks, tensor_parallel in ((1, None), (2, 2), (2, 1)):
        run_ranks(run_checkpoints, models["qwen3"], tmp_path, tensor_parallel, num_ranks=num_ranks)
    run_ranks(run_fsdp_from, models["qwen3"], tmp_path, "2-2", num_ranks=1)
    theirs, ours = (load_file(tmp_path / f"model-{stem}" / "model.safetensors") for stem in ("1-None", "2-2"))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0.01, atol=2e-6)


def run_fsdp_from(mesh: DeviceMesh, model: Path, output: Path, stem: str) -> None:
    """The FSDP backend goes on from the other's checkpoint as from its own."""
    learner, results = start(model, mesh=mesh, tensor_parallel=None), list[dict[str, Tensor]]()
    for saved in ("1-None", stem):
        learner.load_checkpoint(output / f"checkpoint-{saved}")
        steps(learner, 1)
        results.append(parameters(learner))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=2e-6, msg=name)


def run_publication(mesh: DeviceMesh, model: Path, output: Path, tensor_parallel: int) -> None:
    """Publishes after a step, twice around a sleep; rank 0 writes what readers see and what it exports."""
    learner = start(model, mesh=mesh, tensor_parallel=tensor_parallel, state_dir=output, rollout={"dtype": "bfloat16"})
    steps(learner, 1)
    for version in (1, 2):
        publication = publish_to_all(learner, version)
        if dist.get_rank() == 0:
            imported = import_weights(publication, timeout_s=30)
            save_file({name: imported.gathered(name) for name in imported.entries}, output / f"published-{version}.safetensors")
            imported.close()
        dist.barrier()
        learner.backend.withdraw()
        if version == 1:
            memory = cast(Any, learner.backend).memory
            before = [part.weights.clone() for part in cast(Any, learner.backend)._policy.parts]
            assert memory.pause_tags(TAGS) > 0
            memory.resume_tags(TAGS)
            memory.wait_for_content()
            after = [part.weights for part in cast(Any, learner.backend)._policy.parts]
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    learner.backend.export_model(output / "model")
    learner.backend.close()


def publish_to_all(learner: Learner, version: int) -> PublishedWeights:
    """Publishes; returns the handles of all ranks."""
    handle = learner.backend.publish(policy_version=version).handle
    handles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, handle.SerializeToString())
    return PublishedWeights(boot_id="one", policy_version=version, handles=[type(handle).FromString(each) for each in handles])


@pytest.mark.parametrize(("kind", "num_ranks", "tensor_parallel"), [("qwen2_tied", 1, 1), ("qwen3", 4, 2)])
def test_published_weights_are_the_exported_models(
    models: dict[str, Path], tmp_path: Path, kind: str, num_ranks: int, tensor_parallel: int
) -> None:
    run_ranks(run_publication, models[kind], tmp_path, tensor_parallel, num_ranks=num_ranks)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    names = load_file(models[kind] / "model.safetensors").keys()
    assert exported.keys() == names
    for version in (1, 2):
        published = load_file(tmp_path / f"published-{version}.safetensors")
        assert published.keys() == names
        for name, tensor in exported.items():
            assert torch.equal(published[name].view(torch.int16), tensor.view(torch.int16)), name
