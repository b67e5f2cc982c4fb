"""Adapters on the megatron-core backend: steps, weights and folders are those of PEFT, however the ranks are laid out."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from tasuki.models.adapter_folder import FUSED
from tasuki.trainer.backends.fsdp.checkpoint import export_checkpoint
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import InvalidArgument
from tests.integration import trainer_samples as plain
from tests.integration.launched import run_ranks
from tests.integration.learning import learn
from tests.integration.test_megatron import VOCAB_SIZE, Layout, publish_to_all, start_as
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

SETTINGS = {
    "learning_rate": plain.LEARNING_RATE,
    "eps": plain.EPS,
    "weight_decay": plain.WEIGHT_DECAY,
    "max_grad_norm": plain.MAX_GRAD_NORM,
}
ALL = {"rank": 4, "alpha": 8, "init": "xavier", "target_modules": [*FUSED]}
KINDS: dict[str, dict[str, Any]] = {
    "canonical": {
        **ALL,
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"0.*.(q|down)_proj": 3},
        "alpha_pattern": {"v_proj": 5},
    },
    "lora": {**ALL, "type": "lora", "exclude_modules": ["decoder.layers.0.mlp.linear_fc1"], "rank_pattern": {"0.*.o_proj": 3}},
    "dora": {**ALL, "type": "dora", "use_rslora": True},
    "canonical_dora": {**ALL, "use_dora": True},
}
EXPERTS = {"rank": 4, "alpha": 8, "target_modules": ["linear_qkv", "linear_proj"], "experts": True}
NUM_STEPS = 3


def samples_of(num: int = 13) -> list[Any]:
    return plain.make_samples(num, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)


def step(learner: Learner) -> dict[str, float]:
    report = learn(learner, Role.POLICY, decode_samples(samples_of()), config=plain.LOSS, max_tokens=64)
    return {"loss": report.loss, "grad_norm": learner.optim_step(Role.POLICY).grad_norm}


def run_steps(mesh: DeviceMesh, model: Path, output: Path, layout: Layout, kinds: dict[str, dict[str, Any]]) -> None:
    """Exports before and after the steps, publishes, and repeats the last step from a checkpoint."""
    for name, lora in kinds.items():
        folder, more = output / name, {"checkpointing": "full", **SETTINGS}
        folder.mkdir(exist_ok=True)
        dist.barrier()
        learner = start_as(layout, model, mesh=mesh, state_dir=folder, lora=lora, **more)
        learner.backend.export_model(folder / "before")
        facts = [step(learner) for _ in range(NUM_STEPS - 1)]
        learner.save_checkpoint(folder / "checkpoint")
        facts.append(step(learner))
        learner.backend.export_model(folder / "after")
        publication = publish_to_all(learner, 1)
        if dist.get_rank() == 0:
            (folder / "facts.json").write_text(json.dumps(facts))
            imported = import_weights(publication, timeout_s=30)
            save_file({name: imported.gathered(name) for name in imported.entries}, folder / "published.safetensors")
            imported.close()
        dist.barrier()
        learner.load_checkpoint(folder / "checkpoint")
        step(learner)
        learner.backend.export_model(folder / "resumed")
        learner.backend.close()


def peft_model(model: Path, adapter: Path, *, is_fused: bool) -> PeftModel:
    """PEFT's, with one A for the layers that megatron-core fuses if `is_fused`."""
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    if is_fused:
        tie(theirs)
    return theirs


def tie(theirs: Any, *, are_equal: bool = True) -> None:
    """Makes one A of those of layers that megatron-core fuses."""
    modules: dict[str, Any] = dict(theirs.named_modules())
    for name, module in modules.items():
        for first, *others in FUSED.values():
            for other in others if name.endswith(f"{first}.lora_A.default") else ():
                tied = modules[name.replace(first, other)]
                assert torch.equal(tied.weight, module.weight) is are_equal
                tied.weight = module.weight


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2_tied", seed=3, vocab_size=VOCAB_SIZE), tmp_path_factory.mktemp("model") / "qwen2")


@pytest.mark.parametrize(
    ("layout", "names"), [((1, 1, 1), [*KINDS]), ((2, 2, 1), [*KINDS]), ((2, 1, 1), ["canonical", "dora"])]
)
def test_steps_and_merged_weights_are_those_of_peft(
    model: Path, tmp_path: Path, layout: tuple[int, int, int], names: list[str]
) -> None:
    run_ranks(run_steps, model, tmp_path, layout, {name: KINDS[name] for name in names}, num_ranks=layout[0])
    for name in names:
        folder, is_fused = tmp_path / name, KINDS[name].get("type") in ("lora", "dora")
        theirs = peft_model(model, folder / "before" / "adapter", is_fused=is_fused)
        optimizer = plain.plain_optimizer(theirs)
        for fact in json.loads((folder / "facts.json").read_text()):
            expected = plain.plain_step_of(theirs, samples_of(), optimizer=optimizer)
            assert fact["loss"] == pytest.approx(expected.loss, abs=1e-5)
            assert fact["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
            assert expected.grad_norm > plain.MAX_GRAD_NORM, "every step is clipped"
        after, resumed = (load_file(folder / each / "adapter" / "adapter_model.safetensors") for each in ("after", "resumed"))
        wanted = {name.replace(".default", "").replace("_vector.weight", "_vector"): tensor for name, tensor in named(theirs)}
        assert after.keys() == wanted.keys() and all(torch.equal(tensor, resumed[name]) for name, tensor in after.items())
        for key, tensor in after.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        exported, published = (load_file(folder / each) for each in ("after/model.safetensors", "published.safetensors"))
        merged = peft_model(model, folder / "after" / "adapter", is_fused=False).merge_and_unload().state_dict()
        assert exported.keys() == published.keys()
        for key, tensor in exported.items():
            assert torch.equal(tensor, published[key]), key
            torch.testing.assert_close(tensor.float(), merged[key], rtol=2**-7, atol=1e-6, msg=f"{name}: {key}")


def named(theirs: PeftModel) -> list[tuple[str, Tensor]]:
    return [(name, param.detach()) for name, param in theirs.named_parameters(remove_duplicate=False) if ".lora_" in name]


def test_adapters_of_experts_are_those_of_fsdp(tmp_path: Path) -> None:
    model = save_checkpoint(make_model("qwen3_moe", seed=3, vocab_size=VOCAB_SIZE, num_experts=4), tmp_path / "qwen3_moe")
    named = EXPERTS | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    run_ranks(run_steps, model, tmp_path, None, {"expected": named}, num_ranks=1)
    for layout in ((2, 2, 2), (2, 1, 2), (2, 1, 1)):
        run_ranks(run_steps, model, tmp_path, layout, {str(layout): EXPERTS}, num_ranks=layout[0])
        found, expected = tmp_path / str(layout), tmp_path / "expected"
        facts, others = (json.loads((folder / "facts.json").read_text()) for folder in (found, expected))
        for one, other in zip(facts, others, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
        for file in ("after/adapter/adapter_model", "after/model", "published", "before/adapter/adapter_model"):
            tensors, wanted = (load_file(folder / f"{file}.safetensors") for folder in (found, expected))
            assert tensors.keys() == wanted.keys()
            for name, tensor in wanted.items():
                tolerance = {"rtol": 2**-7} if tensor.dtype is torch.bfloat16 else {"rtol": 1e-5}
                torch.testing.assert_close(tensors[name], tensor, atol=2e-6, msg=f"{layout}: {file}: {name}", **tolerance)
        after, resumed = (load_file(found / each / "adapter" / "adapter_model.safetensors") for each in ("after", "resumed"))
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in after.items())


FROM_PEFT = {**ALL, "init": "default", "type": "lora"}


def run_from_peft(mesh: DeviceMesh, model: Path, output: Path, layout: Layout) -> None:
    """Starts from `adapter`, publishes and scores it, saves a step; `untied` is refused."""
    more = {"rollout": {"lora": "adapter", "dtype": "bfloat16"}, "state_dir": output, **SETTINGS}
    learner = start_as(layout, model, mesh=mesh, lora=FROM_PEFT | {"path": output / "adapter"}, **more)
    learner.backend.export_model(output / "begun")
    publication = publish_to_all(learner, 1)
    if dist.get_rank() == 0:
        imported = import_weights(publication, timeout_s=30)
        save_file({name: imported.gathered(name) for name in imported.entries}, output / "published.safetensors")
        imported.close()
    dist.barrier()
    batch = [token_batch(decode_samples(samples_of()), device=torch.device("cpu"))]
    scores = {str(role): learner.score(role, batch)[0] for role in (Role.POLICY, Role.REFERENCE)}
    step(learner)
    learner.save_checkpoint(output / "checkpoint")
    learner.backend.export_model(output / "stepped")
    learner.backend.close()
    if dist.get_rank() == 0:
        save_file(scores, output / "scores.safetensors")
    with pytest.raises(InvalidArgument, match="canonical_lora"):
        start_as(layout, model, mesh=mesh, lora=FROM_PEFT | {"path": output / "untied"}, **more)


def test_an_adapter_of_peft_is_continued_and_served_as_it_is(model: Path, tmp_path: Path) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = [part for parts in FUSED.values() for part in parts]
    torch.manual_seed(0)
    theirs = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "untied")
    tie(theirs, are_equal=False)
    theirs.save_pretrained(tmp_path / "adapter")
    run_ranks(run_from_peft, model, tmp_path, (2, 2, 1), num_ranks=2)
    given, begun, published = (
        load_file(tmp_path / f"{each}.safetensors")
        for each in ("adapter/adapter_model", "begun/adapter/adapter_model", "published")
    )
    assert given.keys() == begun.keys() and all(torch.equal(tensor, begun[name]) for name, tensor in given.items())
    assert {f"base_model.model.{name}" for name in published} == given.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, given[f"base_model.model.{name}"].bfloat16()), name
    scores = load_file(tmp_path / "scores.safetensors")
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    for role, folder in ((Role.POLICY, tmp_path / "merged"), (Role.REFERENCE, model)):
        rows = plain.plain_log_probs(folder, samples_of(), dtype=torch.float32)
        expected = torch.tensor([value for row in rows for value in row])
        torch.testing.assert_close(scores[str(role)], expected, rtol=0, atol=1e-4)
    # As `tasuki export` does from the checkpoint.
    export_checkpoint(
        tmp_path / "checkpoint",
        tmp_path / "out",
        source=model,
        compute_dtype="float32",
        dtype="bfloat16",
        told=lambda done, total: None,
    )
    for file in ("adapter/adapter_model.safetensors", "model.safetensors"):
        tensors, wanted = (load_file(tmp_path / each / file) for each in ("out", "stepped"))
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in wanted.items() if "adapter" in file)
        for name, tensor in wanted.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=2**-7, atol=1e-6)


def run_checkpoints(mesh: DeviceMesh, model: Path, output: Path, layout: Layout) -> None:
    """Saves after a step, and makes the second one from every checkpoint that is there."""
    lora = {"rank": 4, "use_dora": True}
    learner = start_as(layout, model, mesh=mesh, lora=lora, **SETTINGS)
    if not (output / f"checkpoint-{layout}").exists():
        step(learner)
        learner.save_checkpoint(output / f"checkpoint-{layout}")
    for saved in sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")):
        if not (output / f"{layout} from {saved}").exists():
            learner.load_checkpoint(output / f"checkpoint-{saved}")
            step(learner)
            learner.backend.export_model(output / f"{layout} from {saved}")
    learner.backend.close()


def test_checkpoints_of_adapters_continue_in_any_layout_and_backend(model: Path, tmp_path: Path) -> None:
    for layout in (None, (2, 2, 1), (2, 1, 1), None):
        run_ranks(run_checkpoints, model, tmp_path, layout, num_ranks=1 if layout is None else layout[0])
    files = sorted(tmp_path.glob("* from */adapter/adapter_model.safetensors"))
    first, *others = map(load_file, files)
    assert len(others) == 7
    for other in others:
        assert first.keys() == other.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-6, msg=name)


def run_merging(mesh: DeviceMesh, model: Path, output: Path, layout: Layout, lora: dict[str, Any], dtype: str) -> None:
    """Trains, publishes and sleeps with merged copies, then with adapters merged in place. All that is seen, by way."""
    seen: list[list[Tensor]] = []
    for merges in (False, True):
        learner = start_as(
            layout, model, mesh=mesh, state_dir=output, lora=lora, compute_dtype=dtype, rollout={"dtype": dtype},
            export_stays=False, choices={"merges_in_place": merges}, **SETTINGS,
        )  # fmt: skip
        backend: Any = learner.backend
        base, found = [part.buffer.clone() for part in backend._policy.parts], list[Tensor]()
        batch = [token_batch(decode_samples(samples_of()), device=torch.device("cpu"))]
        backend.publication.rehearse()
        for version in (1, 2, 3):
            found += map(torch.tensor, step(learner).values())
            for _ in range(2):  # as after a pause that failed
                imported = import_weights(publish_to_all(learner, version), timeout_s=30)
                found += [imported.gathered(name).clone() for name in sorted(imported.entries)]
                imported.close()
                dist.barrier()
            is_base = all(torch.equal(part.buffer, each) for part, each in zip(backend._policy.parts, base, strict=True))
            assert is_base is not merges
            if version == 2:
                found += [learner.score(role, batch)[0] for role in (Role.POLICY, Role.REFERENCE)]
            else:
                backend.memory.pause_tags(TAGS)
                backend.memory.resume_tags(TAGS)
            assert all(torch.equal(part.buffer, each) for part, each in zip(backend._policy.parts, base, strict=True))
        backend.close()
        seen.append(found)
    copied, merged = seen
    assert len(copied) == len(merged) > 100 and all(map(torch.equal, copied, merged))


@pytest.mark.parametrize(
    ("kind", "layout", "lora", "dtype"),
    [
        ("qwen2_tied", (2, 2, 1), KINDS["dora"], "float32"),
        pytest.param("qwen2_tied", (2, 1, 1), KINDS["canonical"], "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3_moe", (2, 1, 2), {**EXPERTS, "rank": 8}, "bfloat16", marks=pytest.mark.long),
        # Each rank publishes half of the rows, which ends within an expert.
        pytest.param("qwen3_moe", (2, 1, 1), EXPERTS, "float32", marks=pytest.mark.long),
    ],
)
def test_merging_in_place_changes_no_bit(
    tmp_path: Path, kind: str, layout: tuple[int, int, int], lora: dict[str, Any], dtype: str
) -> None:
    experts = {"num_experts": 4 if layout[2] == 2 else 3} if kind == "qwen3_moe" else {}
    model = save_checkpoint(make_model(kind, seed=3, vocab_size=VOCAB_SIZE, **experts), tmp_path / "model")
    run_ranks(run_merging, model, tmp_path, layout, lora, dtype, num_ranks=layout[0])
