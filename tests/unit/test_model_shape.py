"""A model's shape from its config.json, and errors for unknown ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.models.families import read_model, read_model_shape
from tasuki.wire.errors import InvalidArgument

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def write_model(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in (TINY | changes).items() if value is not None})
    )
    return folder


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings"]
)
def test_a_key_that_a_model_lacks_is_named(key: str, tmp_path: Path):
    with pytest.raises(InvalidArgument) as caught:
        read_model_shape(write_model(tmp_path, **{key: None}))
    assert caught.value.metadata["field"] == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -1),
        ("vocab_size", "many"),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 10**9),
    ],
)
def test_a_key_that_makes_no_sense_is_named(key: str, value: object):
    with pytest.raises(InvalidArgument) as caught:
        read_model(TINY | {key: value})
    assert caught.value.metadata["field"] == key
