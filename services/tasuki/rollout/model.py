"""Facts about a model needed before the engine loads it, read from config.json before heavy imports."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.config.checks import replays_routes
from tasuki.config.schema import NodeConfig
from tasuki.models import families, rope
from tasuki.models.families import FAMILIES
from tasuki.models.family import Model
from tasuki.models.routes import RouteShape
from tasuki.models.tokenizer import read_stop_token_ids
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel

NEXT = "Qwen3NextForCausalLM"
UNROTATED = "SmolLM3ForCausalLM"
"""Served as a Llama, see sglang/unrotated.py."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as configured for this service."""

    path: str
    architecture: str
    """SGLang's name of it."""
    vocab_size: int
    context_length: int
    """Maximum prompt plus completion."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion unless the request ignores them: every end-of-sequence token in the model folder."""
    is_seeded: bool
    """Whether every request is sampled with its own seed."""
    is_speculative: bool = False
    """Whether the engine drafts tokens and verifies them."""
    routes: RouteShape | None = None
    """What the engine reports of the experts of each token."""
    full_attention_interval: int | None = None
    """With gated delta nets, of which each request has states: every layer of this number has full attention instead."""
    rope_theta: float | None = None
    """Base of rotary embeddings, where the engine would not find it in `rope_parameters`."""


def read_model(config: NodeConfig) -> ModelFacts:
    """Raises PathNotFound without a model folder; UnsupportedModel if config.json describes no language model, or one that the engine
    computes differently from the trainer; InvalidArgument if the context exceeds the model's, or the heads cannot be
    split.
    """
    path = config.model.path
    table = _read_json(path / "config.json", path)
    architectures = table.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise UnsupportedModel(f"model.path: {path}/config.json names no architecture")
    if config.served_adapter is not None and table.get("quantization_config"):
        raise InvalidArgument("rollout.lora", '= "adapter" needs weights that are not quantized; leave it at "merged"')
    # A multimodal model nests its language model's configuration.
    text: dict[str, Any] = table.get("text_config", table)
    model = families.read_model(table) if architectures[0] in FAMILIES else None
    routes = None
    if model is not None:
        if config.device == "cpu" and (model.attention.logit_softcap, model.final_logit_softcap) != (None, None):
            architecture = model.shape.architecture
            problem = f"{architecture} caps logits, which SGLang's CPU attention does not support; serve it on GPUs"
            raise UnsupportedModel(f"model.path: {problem}", architecture=architecture, field="device")
        routes = RouteShape.of(model.shape) if replays_routes(config, model.shape) else None
    longest = _size(text, "max_position_embeddings", path)
    wanted = config.rollout.context_length
    if wanted is not None and wanted > longest:
        raise InvalidArgument("rollout.context_length", f"{wanted} is more than the model's {longest} positions")
    heads, tp_size = _size(text, "num_attention_heads", path), config.rollout.tp_size
    if heads % tp_size:
        raise InvalidArgument("rollout.tp_size", f"the model's {heads} attention heads cannot be split over {tp_size} ranks")
    vocab_size = _size(text, "vocab_size", path)
    return ModelFacts(
        path=str(path),
        architecture="LlamaForCausalLM" if architectures[0] == UNROTATED else str(architectures[0]),
        vocab_size=vocab_size,
        context_length=longest if wanted is None else wanted,
        stop_token_ids=read_stop_token_ids(path, vocab_size=vocab_size),
        is_seeded=config.device == "cpu",
        is_speculative="speculative_algorithm" in config.rollout.engine,
        routes=routes,
        full_attention_interval=None if model is None else _full_attention_interval(model),
        rope_theta=next(rope.bases(table), 10000.0) if architectures[0] == NEXT else None,
    )


def _full_attention_interval(model: Model) -> int | None:
    depth, delta = model.shape.num_layers, model.shape.delta
    if delta is None:
        return None
    return next((layer + 1 for layer in range(depth) if layer not in delta.layers), depth + 1)


def check_capacity(total_tokens: int, model: ModelFacts) -> None:
    """Raises InvalidArgument if a KV cache of `total_tokens` cannot hold one sequence of maximum length."""
    if total_tokens < model.context_length:
        raise InvalidArgument(
            "rollout.kv_ratio",
            f"a KV cache of {total_tokens} tokens cannot hold one sequence of {model.context_length}; "
            "raise it, or lower rollout.context_length",
            needed_tokens=model.context_length,
            total_tokens=total_tokens,
        )


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    with named_if_denied(file, key="model.path"):
        if not file.is_file():
            raise PathNotFound(f"model.path: {folder} holds no model (no config.json there)", path=folder)
        text = file.read_bytes()
    try:
        table = json.loads(text)
    except ValueError as error:
        raise UnsupportedModel(f"model.path: {file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise UnsupportedModel(f"model.path: {file} is no model configuration")
    return table


def _size(table: dict[str, Any], key: str, folder: Path) -> int:
    value = table.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"model.path: {folder}/config.json gives no {key}")
    return value
