"""What SGLang keeps of convolutions between tokens."""

from pathlib import Path

import pytest
import torch
from sglang.srt.configs.mamba_utils import mamba2_state_dtype

from tasuki.config.schema import NodeConfig
from tasuki.rollout.environment import engine_environment
from tasuki.rollout.model import ModelFacts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latest_inputs_of_convolutions_have_the_engines_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    config = NodeConfig.model_validate({"state_dir": tmp_path, "model": {"path": tmp_path}, "rollout": {"dtype": dtype}})
    facts = ModelFacts(
        path="", architecture="Qwen3NextForCausalLM", vocab_size=10, context_length=10, stop_token_ids=(), is_seeded=False
    )
    name = "SGLANG_MAMBA_CONV_DTYPE"
    monkeypatch.setenv(name, engine_environment(config, facts, temp_dir=tmp_path)[name])
    assert mamba2_state_dtype().conv == getattr(torch, dtype)
