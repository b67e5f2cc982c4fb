"""An adapter to start from is judged before a node starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasuki.config.checks import check_model
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import check_adapter, check_shared_a
from tasuki.models.known import read_model
from tasuki.models.shape import ModelShape
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.models import make_model
from tests.planned import config_of
from tests.refusal import refusing

FILE, NAME = "adapter_model.safetensors", "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def settings(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / FILE)
    change(held)
    save_file(held, folder / FILE)


def write(folder: Path, targets: tuple[str, ...]) -> ModelShape:
    """Writes an adapter of ones for these layers of the model whose shape it returns."""
    made = make_model("qwen2_tied", seed=0)
    model = read_model(made.config.to_dict() | {"architectures": [type(made).__name__]}).shape
    held: dict[str, torch.Tensor] = {}
    for name, shape in model.parameters().items():
        if (layer := name.removesuffix(".weight")).endswith(targets):
            inside = f"base_model.model.{layer}"
            held |= {f"{inside}.lora_A.weight": torch.ones(4, shape[1]), f"{inside}.lora_B.weight": torch.ones(shape[0], 4)}
    save_file(held, folder / FILE)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "bias": "none", "use_dora": False, "rank_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return model


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / FILE).unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: (folder / FILE).write_bytes(b"x" * 40), "is no safetensors file"),
        (lambda folder: settings(folder, peft_type="IA3"), "peft_type 'IA3'; only LORA"),
        (lambda folder: settings(folder, use_dora=True), "trainer.lora.use_dora: is False"),
        (lambda folder: settings(folder, modules_to_save=["lm_head"]), "modules_to_save ['lm_head']"),
        (lambda folder: settings(folder, bias="all"), "bias 'all'"),
        (lambda folder: settings(folder, rank_pattern={"q_proj": 2}), "trainer.lora.rank_pattern: is {}"),
        (lambda folder: settings(folder, alpha_pattern={"q_proj": 2}), "trainer.lora.alpha_pattern: is {}"),
        (lambda folder: settings(folder, of_next_year=1), "of_next_year 1"),
        (lambda folder: settings(folder, init_lora_weights="pissa"), "'pissa' belongs to a changed model"),
        (lambda folder: settings(folder, r=8), "trainer.lora.rank: is 4"),
        (lambda folder: settings(folder, lora_alpha=7), "trainer.lora.alpha: is 32"),
        (lambda folder: settings(folder, r="4"), "has r '4'; set the same"),
        (lambda folder: settings(folder, use_rslora=True), "trainer.lora.use_rslora: is False"),
        (lambda folder: tensors(folder, lambda held: held.pop(NAME)), f"lacks {NAME}"),
        (lambda folder: tensors(folder, lambda held: held.update(more=held[NAME].clone())), "holds more"),
        (lambda folder: tensors(folder, lambda held: held.update({NAME: held[NAME][:3]})), f"{NAME} is F32 [3, 4]"),
        (lambda folder: tensors(folder, lambda held: held.update({NAME: held[NAME].double()})), f"{NAME} is F64"),
    ],
)  # fmt: skip
def test_an_adapter_of_something_else_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    config = config_of(trainer={"lora": {"rank": 4, "path": tmp_path, "target_modules": ["q_proj", "down_proj"]}})
    model = write(tmp_path, ("q_proj", "down_proj"))
    check_model(config, model)
    damage(tmp_path)
    with pytest.raises((InvalidArgument, PathNotFound)) as refused:
        check_model(config, model)
    assert words in str(refused.value)
    assert refused.value.metadata["field"].startswith("trainer.lora.")  # which doctor says to change


@pytest.mark.parametrize("named", [5, [["mlp.experts.down_proj"]], "mlp.experts.down_proj"])
def test_target_parameters_that_are_no_names_are_refused(tmp_path: Path, named: object) -> None:
    write(tmp_path, ("q_proj",))
    settings(tmp_path, target_parameters=named)
    lora = LoraConfig(rank=4, target_modules=("q_proj",), experts=True)
    with refusing("trainer.lora.path", match="has target_parameters"):
        check_adapter(tmp_path, read_model(make_model("qwen3_moe", seed=0).config.to_dict()).shape, lora)


@pytest.mark.parametrize(("layer", "is_compared_at_start"), [(0, True), (1, False)])
def test_layers_that_share_an_a_and_have_different_ones_are_refused(
    tmp_path: Path, layer: int, is_compared_at_start: bool
) -> None:
    fused = {"rank": 4, "path": tmp_path, "type": "lora", "target_modules": ["linear_qkv", "linear_fc1"]}
    lora = LoraConfig.model_validate(fused)
    config = config_of(trainer={"backend": "megatron", "lora": fused})
    model = write(tmp_path, lora.targets)
    check_model(config, model)
    check_shared_a(tmp_path / FILE, lora.layers(model), lora)
    name = f"model.layers.{layer}.mlp.up_proj.lora_A.weight"
    tensors(tmp_path, lambda held: held[f"base_model.model.{name}"][3, -1].neg_())
    with refusing("trainer.lora.path", match=name):
        check_model(config, model) if is_compared_at_start else check_shared_a(tmp_path / FILE, lora.layers(model), lora)
    check_model(config_of(trainer={"backend": "megatron", "lora": fused | {"type": "canonical_lora"}}), model)
