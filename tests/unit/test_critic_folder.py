"""A critic that cannot read the policy's output is refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import CriticConfig
from tasuki.node.model_folder import check_model_folders
from tasuki.node.start import start_node
from tasuki.trainer.backends.fsdp.backend import FsdpBackend
from tasuki.wire.errors import InvalidArgument
from tests.choices import choices_for
from tests.refusal import refusing
from tests.sparse_weights import write_sparse_weights
from tests.unit.memory_folder import write_tokenizer

SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def node(folder: Path, *overrides: str, **critic: int) -> NodeConfig:
    for name, sizes in (("policy", SIZES), ("critic", SIZES | critic)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))
        write_sparse_weights(folder / name)
        write_tokenizer(folder / name)
    (folder / "node.toml").write_text('state_dir = "node"\n[model]\npath = "policy"\n[trainer.critic]\npath = "critic"\n')
    return load_config(folder / "node.toml", overrides=overrides)


def test_a_smaller_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with refusing("trainer.critic.path", match="vocabulary of 127 tokens is smaller than the policy's of 128"):
        start_node(node(tmp_path, vocab_size=127))
    assert not (tmp_path / "node").exists()


def test_a_context_shorter_than_the_sequences_is_refused_with_both_lengths(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="context of 64 tokens is shorter than the policy's sequences of up to 256"):
        check_model_folders(node(tmp_path, max_position_embeddings=64))


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ({"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 512]}, r"value_head.weight has shape \[2, 64\]"),
        ({"dtype": "I32", "shape": [1, 64], "data_offsets": [0, 256]}, "value_head.weight is I32"),
        (
            {"dtype": "F32", "shape": [1, 64], "data_offsets": [0, 252]},
            r"value_head.weight has shape \[1, 64\] of F32 in 252 bytes",
        ),
    ],
)
def test_the_head_in_the_policys_folder_is_judged_for_a_critic_without_its_own(
    tmp_path: Path, head: dict[str, Any], problem: str
) -> None:
    config = node(tmp_path)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"critic": CriticConfig()})})
    check_model_folders(config)
    file = tmp_path / "policy" / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    start, end = (len(values) + offset for offset in head["data_offsets"])
    text = json.dumps(header | {"value_head.weight": head | {"data_offsets": [start, end]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + values + bytes(end - start))
    with pytest.raises(InvalidArgument, match=problem):
        check_model_folders(config)


@pytest.mark.parametrize("key", ["rollout.context_length", "trainer.micro_batch_tokens"])
def test_a_context_as_long_as_the_sequences_is_accepted(tmp_path: Path, key: str) -> None:
    check_model_folders(node(tmp_path, f"{key}=64", max_position_embeddings=64, vocab_size=130))


def test_a_trainer_without_a_node_around_it_refuses_it_before_it_loads(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    config = node(tmp_path, vocab_size=127)
    try:
        with pytest.raises(InvalidArgument, match="vocabulary of 127 tokens"):
            FsdpBackend(config, choices_for(config), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    finally:
        dist.destroy_process_group()
