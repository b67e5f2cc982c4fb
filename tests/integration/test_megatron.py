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

from tasuki.trainer.backends.fsdp.lora.adapters import family_of
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.weights.export import checkpoint_shards
from tasuki.weights.imported_weights import import_weights
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, start_learner, trained, whole_parameters
from tests.integration.trainer_samples import LOSS, TEMPERATURE, make_samples
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

# Divisible by the number of tensor-parallel ranks, and large enough for the tokenizer.
VOCAB_SIZE = 132
DENSE, SPARSE = ("qwen3", "qwen2_tied", "llama"), "qwen3_moe"
Layout = tuple[int, int, int] | None
"""Ranks, and those that split layers and that share experts; None: one rank of FSDP."""
LAYOUTS: dict[tuple[int, int, int], Sequence[str]] = {
    (1, 1, 1): (*DENSE, SPARSE),
    (2, 2, 1): (*DENSE, SPARSE),
    (2, 1, 1): ("qwen3", SPARSE),
    (2, 1, 2): (SPARSE,),
    (2, 2, 2): (SPARSE,),
    (4, 2, 1): ("qwen3",),
    (4, 2, 2): (SPARSE,),
    (4, 1, 4): (SPARSE,),
}
# Small gradients, divided by the root of their square, would amplify rounding with a small eps.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
NUM_STEPS = 3


def start(model: Path, *, mesh: DeviceMesh, layout: Layout, **more: Any) -> Learner:
    if layout is not None:
        more |= {"backend": "megatron", "megatron": {"tensor_parallel": layout[1], "expert_parallel": layout[2]}}
    if model.name == SPARSE:
        more |= {"router_aux_loss_coef": 0.1}
    return start_learner(model, mesh=mesh, **SETTINGS | more)


def parameters(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in float32, on rank 0; every rank must call it."""
    if not hasattr(learner.backend, "_whole_tensors"):
        names = family_of(trained(learner, Role.POLICY).network.causal_lm).checkpoint
        return {
            shard.name: shard.local
            for name, each in whole_parameters(learner, Role.POLICY).items()
            for shard in checkpoint_shards(name, tuple(each.shape), (0,) * each.dim(), each, names=names)
        }
    return {name: each for one in cast(Any, learner.backend)._whole_tensors(torch.float32) for name, each in one.items()}


def steps(learner: Learner, num_steps: int, *, seed: int = 0) -> list[dict[str, float]]:
    samples = decode_samples(make_samples(17, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE))
    facts: list[dict[str, float]] = []
    for _ in range(num_steps):
        report = learn(learner, Role.POLICY, samples, config=LOSS, max_tokens=64)
        metrics = {name: part.total for name, part in report.metrics.items()}
        facts.append({"loss": report.loss, **metrics, "grad_norm": learner.optim_step(Role.POLICY).grad_norm})
    return facts


def run_steps(mesh: DeviceMesh, output: Path, models: Sequence[Path], layout: Layout) -> None:
    for model in models:
        learner = start(model, mesh=mesh, layout=layout)
        facts = steps(learner, NUM_STEPS)
        tensors = parameters(learner)
        if dist.get_rank() == 0:
            stem = f"{model.name}-{layout}"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / f"{stem}.safetensors")
            (output / f"{stem}.json").write_text(json.dumps(facts))
        learner.backend.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    more = {SPARSE: {"num_experts": 4}}
    return {
        kind: save_checkpoint(make_model(kind, seed=3, vocab_size=VOCAB_SIZE, **more.get(kind, {})), folder / kind)
        for kind in (*DENSE, SPARSE)
    }


@pytest.fixture(scope="module")
def fsdp_steps(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("steps")
    run_ranks(run_steps, output, list(models.values()), None, num_ranks=1)
    return output


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_are_those_of_fsdp(fsdp_steps: Path, models: dict[str, Path], layout: tuple[int, int, int]) -> None:
    kinds = LAYOUTS[layout]
    run_ranks(run_steps, fsdp_steps, [models[kind] for kind in kinds], layout, num_ranks=layout[0])
    for kind in kinds:
        ours, theirs = (fsdp_steps / f"{kind}-{each}" for each in (layout, None))
        found, expected = (json.loads(stem.with_suffix(".json").read_text()) for stem in (ours, theirs))
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
        assert min(step["grad_norm"] for step in expected) > SETTINGS["max_grad_norm"], "every step is clipped"
        weights, others = (load_file(stem.with_suffix(".safetensors")) for stem in (ours, theirs))
        assert weights.keys() == others.keys()
        for name, tensor in others.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=f"{kind}: {name}")


def run_checkpoints(mesh: DeviceMesh, model: Path, output: Path, layout: Layout) -> None:
    """Saves after one step, goes on, and starts again from the file; rank 0 writes the parameters after each second step."""
    learner = start(model, mesh=mesh, layout=layout)
    stem = str(layout)
    steps(learner, 1)
    learner.save_checkpoint(output / f"checkpoint-{stem}")
    learner.backend.export_model(output / f"model-{stem}")
    steps(learner, 1)
    straight = parameters(learner)
    learner.backend.close()
    for saved in sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")):
        learner = start(model, mesh=mesh, layout=layout)
        learner.load_checkpoint(output / f"checkpoint-{saved}")
        assert learner.policy_version == 1
        steps(learner, 1)
        resumed = parameters(learner)
        if dist.get_rank() == 0:
            for name, tensor in straight.items():
                tolerance = 0.0 if saved == stem else 2e-6
                torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=tolerance, msg=f"{saved} at {stem}: {name}")
        learner.backend.close()


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [("qwen3", [(2, 2, 1), (2, 1, 1)]), (SPARSE, [(2, 1, 2), (2, 2, 1), (4, 2, 2)])],
    ids=["dense", "sparse"],
)
def test_checkpoints_continue_a_run_in_any_layout_and_backend(
    models: dict[str, Path], tmp_path: Path, kind: str, layouts: list[tuple[int, int, int]]
) -> None:
    for layout in (None, *layouts):
        run_ranks(run_checkpoints, models[kind], tmp_path, layout, num_ranks=1 if layout is None else layout[0])
    run_ranks(run_fsdp_from, models[kind], tmp_path, str(layouts[0]), num_ranks=1)
    theirs, ours = (load_file(tmp_path / f"model-{layout}" / "model.safetensors") for layout in (None, layouts[0]))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0.01, atol=2e-6)


def run_fsdp_from(mesh: DeviceMesh, model: Path, output: Path, stem: str) -> None:
    """The FSDP backend goes on from the other's checkpoint as from its own."""
    learner, results = start(model, mesh=mesh, layout=None), list[dict[str, Tensor]]()
    for saved in (str(None), stem):
        learner.load_checkpoint(output / f"checkpoint-{saved}")
        steps(learner, 1)
        results.append(parameters(learner))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=2e-6, msg=name)


def run_publication(mesh: DeviceMesh, model: Path, output: Path, layout: Layout) -> None:
    """Publishes after a step, twice around a sleep; rank 0 writes what readers see and what it exports."""
    learner = start(model, mesh=mesh, layout=layout, state_dir=output, rollout={"dtype": "bfloat16"})
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


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen2_tied", (1, 1, 1)), ("qwen3", (4, 2, 1)), (SPARSE, (4, 2, 2)), (SPARSE, (2, 2, 1))], ids=str
)
def test_published_weights_are_the_exported_models(
    models: dict[str, Path], tmp_path: Path, kind: str, layout: tuple[int, int, int]
) -> None:
    run_ranks(run_publication, models[kind], tmp_path, layout, num_ranks=layout[0])
    exported = load_file(tmp_path / "model" / "model.safetensors")
    names = load_file(models[kind] / "model.safetensors").keys()
    assert exported.keys() == names
    for version in (1, 2):
        published = load_file(tmp_path / f"published-{version}.safetensors")
        assert published.keys() == names
        for name, tensor in exported.items():
            assert torch.equal(published[name].view(torch.int16), tensor.view(torch.int16)), name
