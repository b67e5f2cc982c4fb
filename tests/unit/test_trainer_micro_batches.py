"""Inputs of the trainer's micro-batch plan: the cost of a sample under each role, and limits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.train import check_longest_sample
from tasuki.config.schema import NodeConfig
from tasuki.trainer.roles import Role
from tasuki.trainer.serve import sample_costs
from tasuki.wire.errors import InvalidArgument

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 32_768,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def node(model: Path, *, device: str = "cuda", **trainer: Any) -> NodeConfig:
    tables = {"trainer": {"checkpointing": "full", "num_ranks": 4, **trainer}, "rollout": {"kv_ratio": 0.3}}
    return NodeConfig.model_validate({"state_dir": model, "device": device, "model": {"path": model}, **tables})


def test_each_role_has_the_cost_of_its_network(model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 14}))
    costs = sample_costs(node(model, lora={}, critic={"path": small}))
    assert set(costs) == set(Role)
    assert costs[Role.POLICY].linear == costs[Role.REFERENCE].linear * 4 / 6
    assert costs[Role.POLICY].quadratic == costs[Role.REFERENCE].quadratic == 2 * costs[Role.CRITIC].quadratic
    own = sample_costs(node(model, critic={}))
    assert own[Role.CRITIC].linear == own[Role.POLICY].linear
    assert (own[Role.CRITIC].head, own[Role.POLICY].head) == (6 * 3584, 6 * 3584 * 152_064)
    assert Role.CRITIC not in sample_costs(node(model))


def test_a_run_with_samples_above_the_node_s_micro_batches_is_refused_with_both_numbers() -> None:
    check_longest_sample(64, limit=64)
    with pytest.raises(InvalidArgument, match=r"trainer.micro_batch_tokens: is 64 on this node.* 65 tokens"):
        check_longest_sample(65, limit=64)
