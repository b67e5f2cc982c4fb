"""Exported models: what rollout was given, in its dtype."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import check_adapter
from tasuki.models.known import read_model_shape
from tasuki.models.shape import ROUTER_BIAS
from tasuki.models.stored_tensors import check_stored
from tasuki.trainer.backends.fsdp.checkpoint import _export
from tasuki.trainer.learner import Learner
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import InvalidArgument
from tests.extent import repeated
from tests.integration.learning import fsdp, learn, start_learner, trained
from tests.integration.one_rank import mesh, model
from tests.integration.trainer_samples import LOSS, make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.quantized import quantize_experts, quantize_matrices
from tests.refusal import refusing

__all__ = ["mesh", "model"]


def moved(learner: Learner) -> Learner:
    """Changes every trained weight by less than bfloat16 can show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for param in trained(learner, Role.POLICY).network.parameters():
            if param.requires_grad:
                param.to_local().add_(torch.randn_like(param.to_local()) * 1e-3)
    return learner


@pytest.mark.parametrize(("served", "given", "written"), [
    ("float32", "auto", torch.float32), ("bfloat16", "auto", torch.bfloat16), ("bfloat16", "float32", torch.float32),
])  # fmt: skip
def test_an_export_has_the_bits_and_the_dtype_that_rollout_serves(
    mesh: DeviceMesh, model: Path, tmp_path: Path, served: str, given: str, written: torch.dtype
) -> None:
    learner = moved(start_learner(model, mesh=mesh, rollout={"dtype": served}, export_dtype=given, lora={"rank": 4}))
    backend = fsdp(learner)
    backend.export_model(tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {written}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(written).removeprefix("torch.")
    published = PublishedWeights(policy_version=0, handles=[backend.publication.publish(0).handle])
    imported = import_weights(published, timeout_s=5)
    for name, tensor in exported.items():
        assert torch.equal(imported.gathered(name), tensor) or given != "auto", name
    imported.close()
    backend.close()


@pytest.mark.parametrize(
    ("kind", "quantize"), [("gpt_oss", quantize_experts), ("deepseek_v3", quantize_matrices), ("draft", quantize_matrices)]
)
def test_what_was_quantized_is_exported_in_bfloat16(
    mesh: DeviceMesh, tmp_path: Path, kind: str, quantize: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    folder = save_checkpoint(make_model(kind.replace("draft", "deepseek_v3"), seed=1), tmp_path / "start")
    expected = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in quantize(folder).items()}
    if kind == "draft":  # the second layer is for speculation, and not trained
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
    backend = fsdp(start_learner(folder, mesh=mesh, rollout={"dtype": "bfloat16"}))
    backend.export_model(tmp_path / "model")
    backend.close()
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: torch.equal(tensor, exported.pop(name)) for name, tensor in expected.items()} == dict.fromkeys(expected, True)
    assert not exported
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())


PATTERNS = {"exclude_modules": ["0.self_attn.o_proj"], "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 9.0}}
DORA = {"use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]}
PISSA = {"init": "pissa", "use_rslora": True}
LORA = {"rank": 3, "alpha": 5, "target_modules": ["o_proj"]}
EXPERTS = {"experts": True, "rank": 4}
EXPORTED = [
    (kind, lora)
    for kind in ("llama_tied", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "phi3", "qwen3_5", "qwen2_5_vl", "qwen3_vl")
    for lora in (None, LORA)
]
TELLING = {None: ("deepseek_v3", "gpt_oss", "qwen2_5_vl"), 3: ("llama_tied", "qwen3_5")}


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *repeated(EXPORTED, is_repeat=lambda kind, lora: kind not in TELLING[lora and lora["rank"]]),
        ("qwen3_moe", LORA | EXPERTS),
        ("llama", LORA | PATTERNS),
        ("qwen2", LORA | DORA),
        ("qwen2", LORA | PATTERNS | PISSA),
    ],
)
def test_a_checkpoint_becomes_the_folder_that_its_trainer_exports(
    mesh: DeviceMesh, tmp_path: Path, kind: str, lora: dict[str, object] | None
) -> None:
    folder = save_checkpoint(make_model(kind, seed=2), tmp_path / "start")
    is_trained = kind == "qwen2_5_vl" and lora is None
    learner = moved(start_learner(folder, mesh=mesh, rollout={"dtype": "float32"}, lora=lora, train_tower=is_trained))
    learner.save_checkpoint(tmp_path / "checkpoint")
    fsdp(learner).export_model(tmp_path / "model")
    told: list[tuple[int, int]] = []
    _export(
        tmp_path / "checkpoint",
        tmp_path / "again",
        source=folder,
        held=torch.float32,
        dtype=torch.float32,
        told=lambda *numbers: told.append(numbers),
    )
    assert told == [(index, len(told)) for index in range(len(told))] and told
    files = [path.relative_to(tmp_path / "model") for path in sorted((tmp_path / "model").rglob("*")) if path.is_file()]
    for file in files:
        if file.suffix == ".safetensors":
            ours, theirs = (load_file(tmp_path / name / file) for name in ("again", "model"))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs), file
        else:
            assert (tmp_path / "again" / file).read_text() == (tmp_path / "model" / file).read_text(), file
    assert (tmp_path / "again" / "adapter").exists() is (lora is not None)
    start, end = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "model"))
    tower = {name for name in start if "visual." in name}
    assert bool(tower) is kind.startswith(("qwen3_5", "qwen2_5_vl", "qwen3_vl"))
    assert all(end[name].dtype == torch.float32 for name in tower)
    assert all(torch.equal(end[name].float(), start[name].float()) is not is_trained for name in tower)


MERGED = [
    ("qwen3_moe", EXPERTS),
    ("glm4_moe", EXPERTS),
    ("mixtral", EXPERTS),
    ("qwen3_next", EXPERTS),
    ("deepseek_v3", EXPERTS),
    ("qwen2", PATTERNS),
    ("qwen2", DORA | {"alpha": 40}),
    ("qwen2", {"init": "pissa"}),
    ("qwen3_5", {"tower": True}),
    ("qwen2_5_vl", {"tower": True, "target_modules": ["down_proj"]}),
]


@pytest.mark.parametrize(
    ("kind", "options"), repeated(MERGED, is_repeat=lambda kind, _: kind in ("glm4_moe", "mixtral", "qwen3_next"))
)
def test_adapters_are_published_and_exported_as_peft_merges_them(
    mesh: DeviceMesh, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    folder = save_checkpoint(make_model(kind, seed=2), tmp_path / "start")
    learner = moved(start_learner(folder, mesh=mesh, rollout={"dtype": "float32"}, lora=LORA | options))
    backend = fsdp(learner)
    backend.export_model(tmp_path / "model")
    exported, start = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder))
    published = PublishedWeights(policy_version=0, handles=[backend.publication.publish(0).handle])
    imported = import_weights(published, timeout_s=5)
    auto: Any = AutoModelForImageTextToText if "tower" in options else AutoModelForCausalLM
    base = auto.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert exported.keys() == expected.keys() == set(imported.layout())
    changed = {name for name in exported if not torch.equal(exported[name], start[name].float())}
    assert changed and all("_proj" in name or ".experts." in name or "visual." in name for name in changed)
    again = options if "init" not in options else {"rank": 2 * LORA["rank"], "alpha": 2 * LORA["alpha"]}
    check_adapter(tmp_path / "model" / "adapter", read_model_shape(folder), LoraConfig.model_validate(LORA | again))
    for name, tensor in exported.items():
        assert torch.equal(imported.gathered(name), tensor), name
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
        assert (name in changed) is not torch.equal(expected[name], start[name].float()), name
    imported.close()
    backend.close()


def test_biases_that_a_step_moves_are_published_exported_and_loaded(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("glm4_moe", seed=2), tmp_path / "start")
    start, rate = load_file(folder / "model.safetensors"), {"router_bias_update_rate": 0.01}
    learner = start_learner(folder, mesh=mesh, rollout={"dtype": "float32"}, **rate)
    learn(learner, Role.POLICY, decode_samples(make_samples(4, vocab_size=VOCAB_SIZE)), config=LOSS)
    learner.optim_step(Role.POLICY)
    learner.save_checkpoint(tmp_path / "checkpoint")
    fsdp(learner).export_model(tmp_path / "model")
    options = {"source": folder, "held": torch.float32, "dtype": torch.float32, "told": lambda *_: None}
    _export(tmp_path / "checkpoint", tmp_path / "again", **options)
    published = PublishedWeights(policy_version=1, handles=[fsdp(learner).publication.publish(1).handle])
    imported = import_weights(published, timeout_s=5)
    ours, again = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    name = next(name for name in start if name.endswith(ROUTER_BIAS))
    moved_E = (ours[name] - start[name]).abs()
    assert moved_E.any() and torch.allclose(moved_E, torch.where(moved_E == 0.0, 0.0, 0.01))
    assert torch.equal(again[name], ours[name]) and torch.equal(imported.gathered(name), ours[name])
    imported.close()
    fsdp(learner).close()
    loaded, fixed = start_learner(folder, mesh=mesh, **rate), start_learner(folder, mesh=mesh)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(trained(loaded, Role.POLICY).network.causal_lm.get_buffer(name), ours[name])
    with pytest.raises(InvalidArgument, match="router_bias_update_rate"):
        fixed.load_checkpoint(tmp_path / "checkpoint")


def test_what_is_not_trained_is_exported_in_its_own_dtype(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("glm4_moe", seed=2), tmp_path / "start")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    start = load_file(folder / "model.safetensors")
    kept = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.mlp.gate.bias": torch.randn(5)}
    save_file(start | kept, folder / "model.safetensors")
    kept |= {name: tensor for name, tensor in start.items() if name.endswith(ROUTER_BIAS)}
    assert len(kept) == 3
    fsdp(moved(start_learner(folder, mesh=mesh, export_dtype="bfloat16"))).export_model(tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for name, tensor in exported.items() if name not in kept} == {torch.bfloat16}
    for name, tensor in kept.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name

    save_file(
        start | {"model.layers.2.eh_proj.weight": torch.ones(4, 8, dtype=torch.float8_e5m2)}, folder / "model.safetensors"
    )
    with pytest.raises(InvalidArgument, match=r"eh_proj.weight is F8_E5M2, the trainer reads"):
        check_stored(folder, read_model_shape(folder))


def test_an_exported_model_is_shared_as_the_umask_says(mesh: DeviceMesh, model: Path, tmp_path: Path) -> None:
    """Unlike checkpoints, logs and samples: nothing in it tells of the data. In a run's folder it is private until it is copied."""
    backend, umask = fsdp(start_learner(model, mesh=mesh, lora={"rank": 4})), 0o027
    others = os.umask(umask)
    try:
        backend.export_model(tmp_path / "model")
    finally:
        os.umask(others)
    backend.close()
    paths = [tmp_path / "model", *(tmp_path / "model").rglob("*")]
    assert len(paths) > 5
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_text_that_has_changed_under_a_node_is_not_exported(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("llama_tied", seed=2), tmp_path / "start")
    (folder / "tokenizer.json").write_text("{}")
    backend = fsdp(start_learner(folder, mesh=mesh))
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json has changed since the node started"):
        backend.export_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    backend.export_model(tmp_path / "model")
    backend.close()
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


def test_a_checkpoint_of_another_model_is_not_exported(mesh: DeviceMesh, model: Path, tmp_path: Path) -> None:
    start_learner(model, mesh=mesh).save_checkpoint(tmp_path / "checkpoint")
    other = save_checkpoint(make_model("llama_tied", seed=2), tmp_path / "other")
    with refusing("path", match="tie_word_embeddings False, but"):
        _export(tmp_path / "checkpoint", tmp_path / "again", source=other, held=torch.float32, dtype=torch.float32, told=print)
    assert not (tmp_path / "again").exists()
