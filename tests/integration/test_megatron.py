"""The megatron-core backend beside the FSDP one: the same steps, weights, checkpoints and folders, however the ranks are laid out."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from tasuki.models.family import CheckpointNames
from tasuki.models.known import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.weights.export import checkpoint_shards
from tasuki.weights.imported_weights import import_weights
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, micro_batches, start_learner, whole_parameters, with_denominator
from tests.integration.trainer_samples import LOSS, TEMPERATURE, make_samples, plain_step_of
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

# Divisible by the number of tensor-parallel ranks, and large enough for the tokenizer.
VOCAB_SIZE = 132
DENSE, SPARSE, BALANCED = ("qwen3", "qwen2_tied", "llama"), "qwen3_moe", "qwen3_moe_balanced"
"""The last is SPARSE with an auxiliary loss, which is over the micro-batches of all ranks, and with given routes."""
GROUPED = "qwen3_grouped"
"""Samples of one prompt, which megatron-core's layers compute once, and FSDP's for each."""
Layout = tuple[int, int, int] | None
"""Ranks, and those that split layers and that share experts; None: one rank of FSDP."""
LAYOUTS: dict[tuple[int, int, int], Sequence[str]] = {
    (1, 1, 1): (*DENSE, GROUPED, SPARSE, BALANCED),
    (2, 2, 1): (*DENSE, GROUPED, BALANCED),
    (2, 1, 1): ("qwen3", SPARSE),
    (2, 1, 2): (SPARSE,),
    (2, 2, 2): (SPARSE, BALANCED),
    (4, 2, 1): ("qwen3",),
    (4, 2, 2): (SPARSE,),
    (4, 1, 4): (SPARSE,),
}
# Small gradients, divided by the root of their square, would amplify rounding with a small eps.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
NUM_STEPS = 3


def start(model: Path, *, mesh: DeviceMesh, tensor_parallel: int | None, expert_parallel: int = 1, **more: Any) -> Learner:
    if tensor_parallel is not None:
        more |= {"backend": "megatron", "megatron": {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}}
    more |= {"prefix_sharing": model.name == GROUPED and tensor_parallel is not None}
    if model.name == BALANCED:
        more |= {"router_aux_loss_coef": 0.1}
    return start_learner(model, mesh=mesh, **SETTINGS | more)


def start_as(layout: Layout, model: Path, *, mesh: DeviceMesh, **more: Any) -> Learner:
    _, tensor_parallel, expert_parallel = layout or (1, None, 1)
    return start(model, mesh=mesh, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel, **more)


def stored(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters as tensors of a checkpoint."""
    names = CheckpointNames()
    return {
        shard.name: shard.local
        for name, each in parameters.items()
        for shard in checkpoint_shards(name, tuple(each.shape), (0,) * each.dim(), each, names=names)
    }


def parameters(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in float32, on rank 0; every rank must call it."""
    if not hasattr(learner.backend, "_whole_tensors"):
        return stored(whole_parameters(learner, Role.POLICY))
    return {name: each for one in cast(Any, learner.backend)._whole_tensors(torch.float32) for name, each in one.items()}


def samples_for(model: Path) -> Samples:
    messages = make_samples(17, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE)
    if model.name == GROUPED:
        for index, message in enumerate(messages):
            prompt = messages[index % 3].prompt_token_ids
            message.prompt_token_ids[:] = [*prompt, *range(3, 13)] if index < 3 else prompt
    if model.name != BALANCED:
        return decode_samples(messages)
    shape = RouteShape.of(read_model_shape(model))
    assert shape is not None
    generator = np.random.default_rng(7)
    for message in messages:
        num_tokens = len(message.prompt_token_ids) + len(message.completion_token_ids) - 1
        scores = generator.random((num_tokens, shape.num_layers, shape.num_experts))
        message.routed_experts = scores.argsort(-1)[..., : shape.experts_per_token].astype(shape.dtype).tobytes()
    return decode_samples(messages, routes=shape)


def steps(learner: Learner, num_steps: int) -> list[dict[str, float]]:
    samples = samples_for(cast(Any, learner.backend)._node.model.path)
    facts: list[dict[str, float]] = []
    for _ in range(num_steps):
        report = learn(learner, Role.POLICY, samples, config=LOSS, max_tokens=64)
        metrics = {name: part.total for name, part in report.metrics.items()}
        facts.append({"loss": report.loss, **metrics, "grad_norm": learner.optim_step(Role.POLICY).grad_norm})
    return facts


def run_steps(mesh: DeviceMesh, output: Path, models: Sequence[Path], layout: Layout) -> None:
    for model in models:
        learner = start_as(layout, model, mesh=mesh)
        facts = steps(learner, NUM_STEPS)
        tensors = parameters(learner)
        if model.name == GROUPED and layout is not None:
            batches = micro_batches(
                learner, samples_for(model), config=with_denominator(LOSS, samples_for(model)), max_tokens=64
            )
            assert any(batch.tokens.prompts is not None for batch in batches)
        if model.name == BALANCED:
            batch = token_batch(samples_for(model), device=torch.device("cpu")).choosing(4)
            learner.score(Role.POLICY, [batch])
            assert batch.routes_TR is not None and not (batch.routes_TR < 0).any()
            tensors["chosen experts"] = batch.routes_TR
        if dist.get_rank() == 0:
            stem = f"{model.name}-{layout}"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / f"{stem}.safetensors")
            (output / f"{stem}.json").write_text(json.dumps(facts))
        learner.backend.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": VOCAB_SIZE}
    dense = {kind: save_checkpoint(make_model(kind, seed=3, **sizes), folder / kind) for kind in DENSE}
    dense[GROUPED] = save_checkpoint(make_model("qwen3", seed=3, **sizes), folder / GROUPED)
    experts = make_model(SPARSE, seed=3, **sizes, num_experts=4)
    return dense | {kind: save_checkpoint(experts, folder / kind) for kind in (SPARSE, BALANCED)}


@pytest.fixture(scope="module")
def fsdp_steps(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("steps")
    run_ranks(run_steps, output, list(models.values()), None, num_ranks=1)
    return output


def test_steps_with_experts_are_those_of_transformers(fsdp_steps: Path, models: dict[str, Path]) -> None:
    facts = json.loads((fsdp_steps / f"{SPARSE}-None.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(models[SPARSE], dtype=torch.float32)
    settings = {key: value for key, value in SETTINGS.items() if key not in ("learning_rate", "max_grad_norm")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["learning_rate"], **settings)
    for step in facts:
        optimizer.zero_grad()
        messages = make_samples(17, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE)
        found = plain_step_of(model, messages, optimizer=optimizer)
        assert (found.loss, found.grad_norm) == pytest.approx((step["loss"], step["grad_norm"]), rel=2e-4)
    weights, others = load_file(fsdp_steps / f"{SPARSE}-None.safetensors"), stored(dict(model.named_parameters()))
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor.detach(), rtol=0, atol=2e-6, msg=name)


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
    learner = start_as(layout, model, mesh=mesh)
    stem = str(layout)
    steps(learner, 1)
    learner.save_checkpoint(output / f"checkpoint-{stem}")
    learner.backend.export_model(output / f"model-{stem}")
    steps(learner, 1)
    straight = parameters(learner)
    learner.backend.close()
    for saved in sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")):
        learner = start_as(layout, model, mesh=mesh)
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
    learner, results = start_as(None, model, mesh=mesh), list[dict[str, Tensor]]()
    for saved in (str(None), stem):
        learner.load_checkpoint(output / f"checkpoint-{saved}")
        steps(learner, 1)
        results.append(parameters(learner))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=2e-6, msg=name)


def run_publication(mesh: DeviceMesh, model: Path, output: Path, layout: Layout) -> None:
    """Publishes after a step, twice around a sleep; rank 0 writes what readers see and what it exports."""
    learner = start_as(layout, model, mesh=mesh, state_dir=output, rollout={"dtype": "bfloat16"})
    steps(learner, 1)
    for version in (1, 2):
        publication = publish_to_all(learner, version)
        if dist.get_rank() == 0:
            imported = import_weights(publication, timeout_s=30)
            save_file({name: imported.gathered(name) for name in imported.entries}, output / f"published-{version}.safetensors")
            imported.close()
        dist.barrier()
        learner.backend.publication.withdraw()
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
    handle = learner.backend.publication.publish(version).handle
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
