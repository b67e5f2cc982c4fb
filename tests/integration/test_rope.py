"""Rotary embeddings that are accepted: SGLang's tables against those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasuki.models.rope import SCALED
from tests.models import make_model, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM, LENGTH = 32, 192
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 48},
    "yarn, other betas": {"factor": 4.0, "original_max_position_embeddings": 48, "beta_fast": 16.0, "beta_slow": 2.0},
}


def config_of(name: str) -> LlamaConfig:
    rope = {"rope_type": name.partition(",")[0], "rope_theta": 10_000.0, **PARAMETERS[name]}
    return LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=rope)


@pytest.fixture(scope="module")
def engine_tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """[positions, cosines and sines] by name."""
    folder = tmp_path_factory.mktemp("rope")
    model = save_checkpoint(make_model("llama", seed=0), folder / "model")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "integration" / "engine_rope.py"), str(model), str(folder / "tables")],
        input=json.dumps({name: dict(config_of(name).rope_parameters) for name in PARAMETERS}),
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / "tables")


def test_every_type_that_is_accepted_is_compared() -> None:
    assert {name.partition(",")[0] for name in PARAMETERS} == SCALED


@pytest.mark.parametrize("name", PARAMETERS)
def test_sglang_rotates_as_transformers_does(engine_tables: dict[str, torch.Tensor], name: str) -> None:
    cos, sin = LlamaRotaryEmbedding(config_of(name))(torch.zeros(1), torch.arange(LENGTH)[None])
    table = torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)
    torch.testing.assert_close(engine_tables[name], table, rtol=1e-5, atol=1e-5)
