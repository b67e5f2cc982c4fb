"""Supported rotary embeddings: SGLang's tables against those of transformers."""

from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasuki.models.rope import SCALED
from tests.models import make_model, save_checkpoint

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


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sets the engine's arguments, which SGLang's layers read."""
    model = save_checkpoint(make_model("llama", seed=0), tmp_path_factory.mktemp("rope") / "model")
    kinds = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu", **kinds))


def test_every_type_that_is_accepted_is_compared() -> None:
    assert {name.partition(",")[0] for name in PARAMETERS} == SCALED


@pytest.mark.parametrize("name", PARAMETERS)
def test_sglang_rotates_as_transformers_does(name: str) -> None:
    parameters = dict(config_of(name).rope_parameters)
    rope = get_rope(HEAD_DIM, HEAD_DIM, LENGTH, parameters["rope_theta"], rope_scaling=parameters, dtype=torch.float32)
    cos, sin = LlamaRotaryEmbedding(config_of(name))(torch.zeros(1), torch.arange(LENGTH)[None])
    table = torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)
    torch.testing.assert_close(rope.cos_sin_cache[:LENGTH], table, rtol=1e-5, atol=1e-5)
