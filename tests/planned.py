"""Nodes for tests of the planner, from a few keys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig
from tasuki.models.shape import ModelShape
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, Node, Strategy, node_of
from tasuki.planner.presets import MODELS

_OF_NODE = "micro_batch_tokens", "logit_tokens", "checkpointing", "kept_layers", "shares_base", "kv_tokens", "staying", "critic"


def config_of(**tables: Any) -> NodeConfig:
    """A node on GPUs."""
    return NodeConfig.model_validate({"state_dir": "s", "model": {"path": "m"}, "device": "cuda"} | tables)


def node_with(
    model: ModelShape | str = "qwen2.5-7b",
    *,
    num_ranks: int = 1,
    gpu_bytes: int = 141 * GB,
    host_bytes: int = 2000 * GB,
    strategy: Strategy = Strategy.STAGED,
    trainer: dict[str, Any] | None = None,
    model_folder: str | Path = "m",
    **given: Any,
) -> Node:
    """A node of which nothing stays but what the engine reads, if choices do not say otherwise. given: tables, and fields of Node."""
    choices = {name: given.pop(name) for name in _OF_NODE if name in given}
    config = config_of(model={"path": model_folder}, trainer={"num_ranks": num_ranks} | (trainer or {}), **given)
    shape = MODELS[model] if isinstance(model, str) else model
    node = node_of(config, shape, gpu_bytes=gpu_bytes, host_bytes=host_bytes, strategy=strategy)
    return replace(node.keeping(node.published), **choices)


def chosen_node(
    config: NodeConfig, model: ModelShape | None = None, *, gpu_bytes: int = 141 * GB, host_bytes: int = 2000 * GB
) -> Node:
    """The configuration's node with its open choices made."""
    return choose(node_of(config, model, gpu_bytes=gpu_bytes, host_bytes=host_bytes))
