"""Checks of a model by rollout before an engine starts for it."""

from pathlib import Path
from typing import Any

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.rollout.model import read_model
from tasuki.wire.errors import UnsupportedModel
from tests.models import CONFIGS


def node(folder: Path, kind: str, *, architecture: str, device: str = "cpu", **changes: Any) -> NodeConfig:
    config = CONFIGS[kind]()
    config.update({"architectures": [architecture], **changes})
    config.save_pretrained(folder)
    return NodeConfig.model_validate({"state_dir": folder, "model": {"path": folder}, "device": device})


def test_capped_logits_are_refused_on_a_cpu_and_served_on_gpus(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM caps logits.* CPU attention does not support"):
        read_model(node(tmp_path, "gemma2", architecture="Gemma2ForCausalLM"))
    facts = read_model(node(tmp_path, "gemma2", architecture="Gemma2ForCausalLM", device="cuda"))
    assert facts.architecture == "Gemma2ForCausalLM"


def test_a_model_without_caps_is_served_on_a_cpu(tmp_path: Path) -> None:
    assert read_model(node(tmp_path, "gemma3", architecture="Gemma3ForCausalLM")).vocab_size == CONFIGS["gemma3"]().vocab_size


def test_what_a_family_does_not_support_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        read_model(node(tmp_path, "mistral", architecture="MistralForCausalLM", sliding_window=64))
