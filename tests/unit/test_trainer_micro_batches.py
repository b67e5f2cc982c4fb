"""Inputs of the trainer's micro-batch plan: tokens per micro-batch, and the cost of a sample under each role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.train import check_longest_sample
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner.layout import GB
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.trainer.roles import Role
from tasuki.trainer.serve import micro_batch_tokens, sample_costs
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.ranks_pb2 import TrainerRankResult
from tasuki.v1.types_pb2 import DeviceUsage
from tasuki.wire.errors import InvalidArgument

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 32_768,
}  # fmt: skip


class Gpus:
    """The front of ranks whose GPUs have `sizes` bytes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    async def call(self, command: Any) -> list[TrainerRankResult]:
        assert command.HasField("get_usage")
        usages = [GetUsageResponse(devices=[DeviceUsage(device="cuda:0", total_bytes=size)]) for size in self.sizes]
        return [TrainerRankResult(get_usage=usage) for usage in usages]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def node(model: Path, *, device: str = "cuda", **trainer: Any) -> NodeConfig:
    tables = {"trainer": {"checkpointing": "full", "num_ranks": 4, **trainer}, "rollout": {"kv_ratio": 0.3}}
    return NodeConfig.model_validate({"state_dir": model, "device": device, "model": {"path": model}, **tables})


async def test_ranks_on_gpus_have_the_tokens_of_the_plan_for_the_smallest(model: Path) -> None:
    config = node(model)
    shape, host_bytes = read_model_shape(model), host_memory().total_bytes
    tokens = [await micro_batch_tokens(config, Gpus(141 * GB, size)) for size in (66 * GB, 141 * GB)]
    plans = [node_layout(config, shape, gpu_bytes=size, host_bytes=host_bytes) for size in (66 * GB, 141 * GB)]
    assert tokens == [layout.micro_batch_tokens for layout in plans]
    assert tokens[0] < tokens[1]


@pytest.mark.parametrize(("settings", "tokens"), [({"micro_batch_tokens": 777}, 777), ({"device": "cpu"}, 8192)])
async def test_nobody_asks_for_gpus_where_the_tokens_are_known(model: Path, settings: dict[str, Any], tokens: int) -> None:
    assert await micro_batch_tokens(node(model, **settings), Gpus()) == tokens


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
