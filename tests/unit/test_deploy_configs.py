"""A node accepts the example configurations."""

import json
import shutil
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.load import load_config
from tasuki.planner.node import GB
from tasuki.planner.presets import MODELS, PRESETS

CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.toml"))

PLANNED = {
    "constrained": ("qwen2.5-7b", 32, "trainer.moments=gpu"),
    "balanced": ("qwen2.5-7b", 80, "trainer.num_ranks=2"),
    "70b": ("qwen2.5-72b", 141, "trainer.moments=gpu"),
    "72b-lora": ("qwen2.5-72b", 80, "trainer.checkpointing=none"),
}
"""Model of an example, memory of a GPU in GB, and an override with which it does not fit."""


@pytest.mark.parametrize("name", PLANNED)
def test_an_example_fits_the_gpus_that_it_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, (model, gpu_gb, needed) = CONFIGS[0].with_stem(name), PLANNED[name]
    assert f"tasuki plan {path.name} --gpu-gb {gpu_gb}\n" in path.read_text()
    shutil.copy(path, tmp_path)
    write_config(tmp_path / "model", model)
    arguments = ["plan", str(tmp_path / path.name), "--gpu-gb", str(gpu_gb)]
    assert main(arguments) == 0
    assert main([*arguments, "--set", needed]) == 1, "it would not fit without"
    capsys.readouterr()


@pytest.mark.parametrize("name", PLANNED)
def test_an_example_is_for_the_gpus_of_its_preset(name: str):
    preset = PRESETS["70b+" if name == "70b" else name]
    model, gpu_gb, _ = PLANNED[name]
    config = load_config(CONFIGS[0].with_stem(name))
    assert (preset.model, preset.gpu_bytes, preset.num_gpus) == (model, gpu_gb * GB, config.trainer.num_ranks)
    assert config.rollout.kv_ratio == preset.settings["rollout.kv_ratio"]
    assert preset.settings.get("trainer.lora.rank") == (config.trainer.lora and config.trainer.lora.rank)


def write_config(folder: Path, model: str) -> None:
    """Writes a config.json with the model's shape."""
    shape = MODELS[model]
    table = {
        "architectures": [shape.architecture],
        "model_type": "qwen2",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
