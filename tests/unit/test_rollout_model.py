"""Checks of a model by rollout before an engine starts for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.node.model_folder import check_model_folders
from tasuki.rollout.model import read_model
from tasuki.wire.errors import UnsupportedModel
from tests.models import make_model, save_checkpoint
from tests.refusal import refusing


def base(folder: Path) -> dict[str, Any]:
    return {"state_dir": folder, "model": {"path": folder}, "device": "cpu"}


def test_capped_attention_is_refused_on_a_cpu_and_served_on_gpus(tmp_path: Path) -> None:
    check_model_folders(NodeConfig.model_validate(base(save_checkpoint(make_model("gemma4", seed=0), tmp_path / "head"))))
    save_checkpoint(make_model("gemma2", seed=0), tmp_path)
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM caps attention.* CPU attention does not support"):
        check_model_folders(NodeConfig.model_validate(base(tmp_path)))
    config = NodeConfig.model_validate(base(tmp_path) | {"device": "cuda"})
    check_model_folders(config)
    assert read_model(config).architecture == "Gemma2ForCausalLM"


@pytest.mark.parametrize(
    ("rollout", "key"), [({"context_length": 257}, "rollout.context_length"), ({"tp_size": 3}, "rollout.tp_size")]
)
def test_what_the_engine_cannot_serve_is_refused_with_the_folder(tmp_path: Path, rollout: dict[str, int], key: str) -> None:
    save_checkpoint(make_model("llama", seed=0), tmp_path)
    check_model_folders(NodeConfig.model_validate(base(tmp_path) | {"rollout": {"context_length": 256}}))
    with refusing(key):
        check_model_folders(NodeConfig.model_validate(base(tmp_path) | {"rollout": rollout}))


def test_the_engine_is_told_which_layers_have_full_attention(tmp_path: Path) -> None:
    save_checkpoint(make_model("qwen3_5", seed=0), tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    del table["text_config"]["full_attention_interval"]  # as transformers writes it
    (tmp_path / "config.json").write_text(json.dumps(table))
    facts = read_model(NodeConfig.model_validate({"state_dir": tmp_path, "model": {"path": tmp_path}}))
    assert facts.architecture.startswith("Qwen3_5For") and (facts.context_length, facts.full_attention_interval) == (256, 2)


def test_the_engine_is_told_the_base_that_it_would_not_read(tmp_path: Path) -> None:
    save_checkpoint(make_model("qwen3_next", seed=0), tmp_path)
    config = NodeConfig.model_validate({"state_dir": tmp_path, "model": {"path": tmp_path}})
    assert read_model(config).rope_theta == 500.0
    table = json.loads((tmp_path / "config.json").read_text()) | {"rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(UnsupportedModel, match="several bases"):
        read_model(config)
