"""SGLang never sees the model's generation_config.json."""

import json
from pathlib import Path

import pytest
from sglang.srt.configs.model_config import ModelConfig

from tasuki.rollout.sglang.scheduler import ignore_generation_config
from tests.models import make_model, save_checkpoint


@pytest.mark.parametrize(
    "table", [{"temperature": 0.1, "top_k": 1, "eos_token_id": [9, 999]}, {"max_new_tokens": "x"}, {"pad_token_id": [1]}]
)
def test_no_key_of_it_reaches_the_engine(tmp_path: Path, table: dict[str, object]) -> None:
    folder = save_checkpoint(make_model("qwen2", seed=0), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(table))
    ignore_generation_config()
    override = json.dumps({"eos_token_id": [7]})
    config = ModelConfig(model_path=str(folder), model_override_args=override, sampling_defaults="model")
    assert (config.hf_eos_token_id, config.get_default_sampling_params()) == ({7}, {})
