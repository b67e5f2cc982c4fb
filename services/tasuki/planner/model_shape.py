"""The shapes of a language model's parameters, from a Hugging Face config.json and without torch."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter, as the trainer's module has it -> shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides the bytes of a decoder-only model. Llama, Qwen2, Qwen3 and Qwen3-MoE are all of this form."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    is_tied: bool = False
    """Whether the vocabulary projection is the embedding."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    num_experts: int = 0
    """0: every layer is dense."""
    experts_per_token: int = 0
    expert_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Layers of a mixture of experts that are dense after all."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def layer(self, index: int) -> Shapes:
        """Parameters of one decoder layer: one unit of FSDP2."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q_proj", self.query_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            shapes |= _linear(f"self_attn.{name}", rows, hidden, has_bias=self.has_qkv_bias)
        shapes |= _linear("self_attn.o_proj", hidden, self.query_size, has_bias=self.has_output_bias)
        if self.has_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        if self.is_sparse(index):
            shapes["mlp.gate.weight"] = (self.num_experts, hidden)
            shapes["mlp.experts.gate_up_proj"] = (self.num_experts, 2 * self.expert_size, hidden)
            shapes["mlp.experts.down_proj"] = (self.num_experts, hidden, self.expert_size)
        else:
            for name in ("gate_proj", "up_proj"):
                shapes |= _linear(f"mlp.{name}", self.intermediate_size, hidden, has_bias=self.has_mlp_bias)
            shapes |= _linear("mlp.down_proj", hidden, self.intermediate_size, has_bias=self.has_mlp_bias)
        return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}

    def root(self) -> Shapes:
        """Parameters outside the layers, which stay gathered during a whole step."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table, "norm.weight": (self.hidden_size,)}
        return shapes if self.is_tied else shapes | {"lm_head.weight": table}

    def units(self) -> tuple[Shapes, ...]:
        """The root first, then the layers in their order: all parameters, each once."""
        return _units(self)

    def count_by_kind(self) -> dict[str, int]:
        """Parameters in embedding, vocabulary projection, attention, MLP, experts, router and norms; kinds without any are left out."""
        counts: dict[str, int] = {}
        for unit in self.units():
            for name, shape in unit.items():
                kind = _kind(name)
                counts[kind] = counts.get(kind, 0) + math.prod(shape)
        return counts

    @property
    def num_parameters(self) -> int:
        return sum(self.count_by_kind().values())


@functools.lru_cache(maxsize=16)
def _units(model: ModelShape) -> tuple[Shapes, ...]:
    return (model.root(), *(model.layer(index) for index in range(model.num_layers)))


def read_model_shape(path: Path) -> ModelShape:
    """The shape in `path`, a config.json or a folder that holds one.

    Raises PathNotFound without the file, UnsupportedModel for another architecture, InvalidArgument naming a key that is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PathNotFound(f"model: {file} does not exist; give a config.json or a folder that holds one", path=file)
    return shape_of(read_json_object(file, field="model"))


def read_json_object(file: Path, *, field: str) -> dict[str, Any]:
    """Raises InvalidArgument naming `field` for a file that holds anything else."""
    try:
        table = json.loads(file.read_text())
    except ValueError as error:
        raise InvalidArgument(field, f"{file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise InvalidArgument(field, f"{file} holds no JSON object")
    return table


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json's table describes; raises as read_model_shape."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "none"
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"architectures: the planner does not know {architecture}; it knows {known}", architecture=architecture
        )
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers = _size(config, "num_hidden_layers")
    head_dim = _size(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise InvalidArgument("num_key_value_heads", f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    is_qwen3 = architecture.startswith("Qwen3")
    bias = config.get("attention_bias") is True
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size"),
        context_length=_size(config, "max_position_embeddings"),
        is_tied=config.get("tie_word_embeddings") is True,
        has_qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=bias and architecture != "Qwen2ForCausalLM",
        has_mlp_bias=architecture == "LlamaForCausalLM" and config.get("mlp_bias") is True,
        has_qk_norm=is_qwen3,
        **(_experts(config, num_layers=num_layers) if architecture == "Qwen3MoeForCausalLM" else {}),
    )


ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def _experts(config: Mapping[str, Any], *, num_layers: int) -> dict[str, Any]:
    step = _size(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    listed = config.get("mlp_only_layers") or []
    dense = {layer for layer in range(num_layers) if layer in listed or (layer + 1) % step}
    return {
        # transformers 5 writes the second name.
        "num_experts": _size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "expert_size": _size(config, "moe_intermediate_size"),
        "dense_layers": frozenset(dense),
    }


def _size(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise InvalidArgument(key, "missing in the model's config.json")
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(key, f"must be a whole number above 0 in the model's config.json, not {value!r}")
    return value


def _linear(name: str, rows: int, columns: int, *, has_bias: bool) -> Shapes:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if has_bias else weight


def _kind(name: str) -> str:
    for mark, kind in (
        ("embed_tokens", "embedding"),
        ("lm_head", "vocabulary projection"),
        ("norm", "norms"),
        ("self_attn", "attention"),
        ("experts", "experts"),
        ("mlp.gate.", "router"),
    ):
        if mark in name:
            return kind
    return "mlp"
