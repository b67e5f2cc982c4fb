"""Names and shapes of a decoder's parameters, as in its transformers module."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from tasuki.models.config_json import Config, architecture_of, flag, num_layers, size
from tasuki.models.tower import TOWER, Tower
from tasuki.wire.errors import InvalidArgument

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> shape."""


class QkNorm(StrEnum):
    """Dimensions that query and key norms cover."""

    HEAD = "head"
    PROJECTION = "projection"
    """All heads at once, before the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of latent attention (MLA): keys and values are projected from one small vector a token, which the engine caches."""

    kv_rank: int
    """Size of that vector."""
    query_rank: int | None
    """Size of the vector that queries are projected from; None if they come from the hidden states."""
    rope_dim: int
    """Rotated part of each head of queries and keys, its last. All heads of keys share it."""
    value_dim: int
    """Size of a head of values."""

    @property
    def cached_size(self) -> int:
        """Numbers that the engine caches for a token in a layer, on every rank."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated delta nets, which take attention's place in some layers."""

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Tokens that the convolution over queries, keys and values sees."""
    has_fused_inputs: bool = False
    """Whether queries, keys, values and gates are fused in one linear layer, and the two numbers of each head in another."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    def parameters(self, hidden_size: int) -> Shapes:
        heads, value = self.num_value_heads, self.value_size
        rows = {"qkvz": self.conv_size + value, "ba": 2 * heads}
        if not self.has_fused_inputs:
            rows = {"qkv": self.conv_size, "z": value, "b": heads, "a": heads}
        return {
            "linear_attn.dt_bias": (heads,),
            "linear_attn.A_log": (heads,),
            "linear_attn.conv1d.weight": (self.conv_size, 1, self.kernel_size),
            "linear_attn.norm.weight": (self.value_head_dim,),
            "linear_attn.out_proj.weight": (hidden_size, value),
            **{f"linear_attn.in_proj_{name}.weight": (num_rows, hidden_size) for name, num_rows in rows.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Fields of ModelShape that differ between layers."""

    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    has_own_keys: bool = True
    has_value_projection: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and flags that determine a decoder-only model's memory."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    layer_sizes: tuple[LayerSizes, ...] = ()
    """Of each layer, if layers differ; the same fields here are then the largest, of heads for keys the fewest. See `at`."""
    has_own_keys: bool = True
    """Whether attention has keys and values of its own, not those of an earlier layer."""
    has_value_projection: bool = True
    """Whether values have a linear layer, and are neither projected as keys nor of an earlier layer."""
    is_tied: bool = False
    """Whether the LM head is tied to the embedding."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: QkNorm | None = None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and before the MLP, each as wide as the hidden states."""
    post_norms: tuple[str, ...] = ()
    """Norms after attention and after the MLP."""
    has_value_norm: bool = False
    """Whether values have a norm over each head, without weights."""
    has_float_norms: bool = False
    """Whether norms multiply by their weights in float32, before rounding."""
    has_offset_norms: bool = False
    """Whether norms add 1 to their weights."""
    has_fused_qkv: bool = False
    """Whether queries, keys and values are fused in one linear layer, in this order."""
    has_fused_gate_up: bool = False
    """Whether gate and up are fused in one linear layer, in this order."""
    joins_rotated: bool = False
    """Whether heads are concatenated from a rotated part and the rest."""
    caps_attention: bool = False
    """Whether attention logits are capped, which needs their whole matrix."""
    has_whole_embedding: bool = False
    """Whether every engine rank holds the whole embedding."""
    is_critic: bool = False
    """Whether a value head replaces the LM head."""
    num_experts: int = 0
    """0 if every layer is dense."""
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    """Inner size of an MLP that every token passes beside its experts; 0 without one."""
    has_biased_experts: bool = False
    """Whether experts and router have biases, and experts' matrices are [inputs, outputs], with gates and ups interleaved."""
    has_sinks: bool = False
    """Whether each head has a learned logit that takes weight in its softmax and adds nothing."""
    has_shared_expert_gate: bool = False
    """Whether that MLP's result is scaled by a sigmoid of the token."""
    has_router_bias: bool = False
    """Whether a constant float32 bias affects the choice of experts, but not their weights."""
    dense_layers: frozenset[int] = frozenset()
    """Dense layers of a mixture of experts."""
    latent: Latent | None = None
    """Sizes of latent attention; `head_dim` is then that of queries and keys, of which there are as many. None without."""
    delta: DeltaNet | None = None
    layer_input_size: int = 0
    """Size of each layer's own input, from a second embedding and a projection of the first; 0 without."""
    has_layer_scalars: bool = False
    """Whether each layer's result is multiplied by a constant of the checkpoint."""
    has_output_gate: bool = False
    """Whether attention's result is scaled by a sigmoid, whose inputs are projected beside the queries, head by head."""
    tower: Tower | None = None
    """The vision tower beside the text, which is not trained."""
    num_draft_layers: int = 0
    """Layers of the checkpoint after the last, for speculation: neither loaded nor trained."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_outputs(self) -> int:
        """Outputs per token: logits, or a value."""
        return 1 if self.is_critic else self.vocab_size

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def cached_layers(self) -> "list[ModelShape]":
        """The shape `at` each layer whose keys and values are cached, in order."""
        layers = (self.at(index) for index in range(self.num_layers) if not self.is_delta(index))
        return [layer for layer in layers if layer.has_own_keys]

    def at(self, index: int) -> "ModelShape":
        """A model whose layers all have the sizes of layer `index`."""
        return _at(self, self.layer_sizes[index]) if self.layer_sizes else self

    def is_sparse(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def is_delta(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

    def layer(self, index: int) -> Shapes:
        """Parameters of one decoder layer, an FSDP2 unit."""
        return _layer(self.at(index), self.is_sparse(index), self.is_delta(index))

    def root(self) -> Shapes:
        """Parameters outside the layers, which stay gathered for a whole step."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table, "norm.weight": (self.hidden_size,)}
        if self.layer_input_size:
            width = self.num_layers * self.layer_input_size
            shapes |= {LAYER_TABLE: (self.vocab_size, width), "per_layer_projection_norm.weight": (self.layer_input_size,)}
            shapes["per_layer_model_projection.weight"] = (width, self.hidden_size)
        if self.is_critic:
            return shapes | {"value_head.weight": (1, self.hidden_size)}
        return shapes if self.is_tied else shapes | {"lm_head.weight": table}

    def units(self) -> tuple[Shapes, ...]:
        """The root, then the layers in order: all parameters but the tower's, each once."""
        return _units(self)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """All parameters, named as in the transformers module."""
        root, *layers = self.units()
        named = {name if name.startswith("lm_head") else f"model.{name}": shape for name, shape in root.items()}
        for index, layer in enumerate(layers):
            named |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return named | {TOWER + name: shape for name, shape in self.tower_parameters().items()}

    def tower_parameters(self) -> Shapes:
        """Parameters of the vision tower, an FSDP2 unit; empty without one."""
        return {} if self.tower is None else self.tower.parameters()

    def constants(self) -> dict[str, tuple[int, ...]]:
        """Float32 tensors of a checkpoint that are not trained, named as the module's buffers."""
        sparse = filter(self.is_sparse, range(self.num_layers)) if self.has_router_bias else ()
        scaled = range(self.num_layers) if self.has_layer_scalars else ()
        return {f"model.layers.{index}.{ROUTER_BIAS}": (self.num_experts,) for index in sparse} | {
            f"model.layers.{index}.{LAYER_SCALAR}": (1,) for index in scaled
        }

    def kept_tensors(self) -> frozenset[str]:
        """Names of tensors that an export copies unchanged: constants in their own dtype, and keys and values that no layer uses."""
        names = (
            f"{index}.{name}"
            for index in range(self.num_layers)
            for name in (LAYER_SCALAR, *(() if self.at(index).has_own_keys else _UNUSED_KEYS))
        )
        return frozenset(f"model.layers.{name}" for name in names) if self.has_layer_scalars else frozenset()

    def linear_layers(self, index: int) -> tuple[str, ...]:
        """Last names of the linear layers in decoder layer `index`, which may have adapters: q_proj, ...

        Only attention's beside experts: PEFT gives an adapter named as another linear layer to the experts.
        """
        return tuple(
            name.removesuffix(".weight").rpartition(".")[2]
            for name, shape in self.layer(index).items()
            if len(shape) == 2 and not (self.num_experts and name.startswith("mlp."))
        )

    def count_by_kind(self) -> dict[str, int]:
        """Parameters in embedding, LM head, attention, MLP, experts, router, norms and vision tower; leaves out empty kinds."""
        counts: dict[str, int] = {}
        for unit in self.units():
            for name, shape in unit.items():
                kind = _kind(name)
                counts[kind] = counts.get(kind, 0) + math.prod(shape)
        if self.tower is not None:
            counts["vision tower"] = sum(map(math.prod, self.tower.parameters().values()))
        return counts

    @property
    def num_parameters(self) -> int:
        return sum(self.count_by_kind().values())

    def _attention(self) -> dict[str, tuple[int, ...]]:
        if self.latent is not None:
            return self._latent_attention(self.latent)
        query, kv = self.query_size, self.kv_size
        gated = 2 * query if self.has_output_gate else query
        rows = {"qkv_proj": query + 2 * kv} if self.has_fused_qkv else {"q_proj": gated, "k_proj": kv, "v_proj": kv}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, num_rows in rows.items():
            shapes |= _linear(f"self_attn.{name}", num_rows, self.hidden_size, has_bias=self.has_qkv_bias)
        shapes |= _linear("self_attn.o_proj", self.hidden_size, query, has_bias=self.has_output_bias)
        if self.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if self.qk_norm is QkNorm.HEAD else (query, kv)
            shapes |= {f"self_attn.{name}.weight": (width,) for name, width in zip(("q_norm", "k_norm"), widths, strict=True)}
        for name in () if self.has_value_projection else ("v_proj",) if self.has_own_keys else ("k_proj", "v_proj", "k_norm"):
            del shapes[f"self_attn.{name}.weight"]
        return shapes | {"self_attn.sinks": (self.num_heads,)} if self.has_sinks else shapes

    def _latent_attention(self, latent: Latent) -> dict[str, tuple[int, ...]]:
        hidden, heads, rank, inner = self.hidden_size, self.num_heads, latent.kv_rank, latent.query_rank
        nope_and_value = self.head_dim - latent.rope_dim + latent.value_dim
        queries: dict[str, tuple[int, ...]] = {"q_proj": (self.query_size, hidden)}
        if inner is not None:
            queries = {"q_a_proj": (inner, hidden), "q_a_layernorm": (inner,), "q_b_proj": (self.query_size, inner)}
        shapes = queries | {
            "kv_a_proj_with_mqa": (latent.cached_size, hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * nope_and_value, rank),
            "o_proj": (hidden, heads * latent.value_dim),
        }
        return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}

    def _mlp(self) -> dict[str, tuple[int, ...]]:
        inner, hidden = self.intermediate_size, self.hidden_size
        rows = {"gate_up_proj": 2 * inner} if self.has_fused_gate_up else {"gate_proj": inner, "up_proj": inner}
        return {f"mlp.{name}.weight": (num_rows, hidden) for name, num_rows in rows.items()} | {
            "mlp.down_proj.weight": (hidden, inner)
        }

    def _experts(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, shared = self.hidden_size, self.expert_size, self.shared_expert_size
        if self.has_biased_experts:
            return _linear(OSS_ROUTER, self.num_experts, hidden, has_bias=True) | {
                f"{name}{suffix}": (self.num_experts, *sizes)
                for name, (rows, columns) in zip(EXPERTS, ((hidden, 2 * inner), (inner, hidden)), strict=True)
                for suffix, sizes in (("", (rows, columns)), ("_bias", (columns,)))
            }
        rows = {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)} if shared else {}
        beside = "shared_expert" if self.has_shared_expert_gate else "shared_experts"
        return {
            **{f"mlp.{beside}.{name}.weight": shape for name, shape in rows.items()},
            **({"mlp.shared_expert_gate.weight": (1, hidden)} if self.has_shared_expert_gate else {}),
            ROUTER: (self.num_experts, hidden),
            **dict(zip(EXPERTS, ((self.num_experts, 2 * inner, hidden), (self.num_experts, hidden, inner)), strict=True)),
        }


LAYER_SCALAR, LAYER_TABLE = "layer_scalar", "embed_tokens_per_layer.weight"
_UNUSED_KEYS = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
ROUTER, ROUTER_BIAS = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
OSS_ROUTER = "mlp.router"
ROUTERS = (ROUTER, OSS_ROUTER)
CONSTANTS = (ROUTER_BIAS, LAYER_SCALAR)
"""Ends of the names of constants."""
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Matrices of all experts of a layer, with the expert as first dimension."""
SPLIT_BY_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Matrices of which an engine rank holds columns."""
VOCABULARY_STEP = 64
"""The engine pads the vocabulary to a multiple of this."""


def unshared_base(shape: ModelShape, *, num_ranks: int) -> str | None:
    """Why engine and trainer, of this many ranks each, cannot read one copy of the model; None if they can."""
    if shape.num_experts:
        return "has experts, which the engine holds otherwise"
    if shape.latent is not None:
        return "has latent attention, which the engine holds otherwise"
    if shape.delta is not None:
        return "has gated delta nets, whose projections the engine fuses"
    if shape.tower is not None:
        return "has a vision tower, which the engine holds otherwise"
    if shape.architecture == "Gemma2ForCausalLM" or shape.has_fused_qkv:
        return "has weights that the engine changes when it loads them"
    if num_ranks == 1:
        return None
    if shape.has_fused_gate_up:
        return f"has fused layers, of which each of {num_ranks} engine ranks holds several runs of rows"
    for number, what in (
        (shape.num_heads, "attention heads"),
        (shape.num_kv_heads, "key-value heads"),
        (shape.intermediate_size, "columns of the MLP"),
        (shape.vocab_size, "rows of the vocabulary"),
    ):
        if number % num_ranks:
            return f"has {number} {what}, which {num_ranks} ranks cannot share evenly"
    if shape.vocab_size % VOCABULARY_STEP and not shape.has_whole_embedding:
        return (
            f"has {shape.vocab_size} rows of the vocabulary: the engine pads them to a multiple of {VOCABULARY_STEP} "
            f"before {num_ranks} ranks share them, the trainer does not"
        )
    return None


def decoder_shape(
    config: Config,
    *,
    is_tied: bool = False,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    **special: Any,
) -> ModelShape:
    """The shape described by the keys common to all decoders. special: the other fields of ModelShape.

    is_tied, head_dim, intermediate_size: if config.json lacks them; without head_dim it is the hidden size divided by the number of heads.
    Raises InvalidArgument naming a missing or invalid key.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise InvalidArgument("num_key_value_heads", f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    # transformers gives the rotated part of latent attention this name.
    given = {} if "latent" in special else config
    head_dim = size(given, "head_dim", default=hidden // heads if head_dim is None else head_dim)
    if head_dim % 2 and given:
        raise InvalidArgument("head_dim", f"a rotary embedding needs an even number, not {head_dim}")
    chosen, experts = special.get("experts_per_token", 0), special.get("num_experts", 0)
    if chosen > experts:
        raise InvalidArgument("num_experts_per_tok", f"a token cannot choose {chosen} of {experts} experts")
    return ModelShape(
        architecture=architecture_of(config),
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size", default=intermediate_size),
        num_layers=num_layers(config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=size(config, "vocab_size"),
        context_length=size(config, "max_position_embeddings"),
        is_tied=flag(config, "tie_word_embeddings", default=is_tied),
        **special,
    )


@functools.lru_cache(maxsize=64)
def _at(model: ModelShape, sizes: LayerSizes) -> ModelShape:
    return replace(model, layer_sizes=(), **{field.name: getattr(sizes, field.name) for field in fields(sizes)})


@functools.lru_cache(maxsize=32)
def _layer(model: ModelShape, is_sparse: bool, is_delta: bool) -> Shapes:
    mlp = model._experts() if is_sparse else model._mlp()
    mixer = model.delta.parameters(model.hidden_size) if is_delta and model.delta is not None else model._attention()
    if size := model.layer_input_size:
        mlp |= {
            "per_layer_input_gate.weight": (size, model.hidden_size),
            "per_layer_projection.weight": (model.hidden_size, size),
        }
        mlp["post_per_layer_input_norm.weight"] = (model.hidden_size,)
    return {**mixer} | mlp | {f"{norm}.weight": (model.hidden_size,) for norm in model.norms + model.post_norms}


@functools.lru_cache(maxsize=16)
def _units(model: ModelShape) -> tuple[Shapes, ...]:
    return (model.root(), *(model.layer(index) for index in range(model.num_layers)))


def _linear(name: str, rows: int, columns: int, *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if has_bias else weight


def _kind(name: str) -> str:
    for mark, kind in (
        ("embed_tokens", "embedding"),
        ("per_layer_proj", "mlp"),
        ("lm_head", "vocabulary projection"),
        ("value_head", "value head"),
        ("norm", "norms"),
        ("_attn", "attention"),
        ("expert", "experts"),
        ("mlp.gate.", "router"),
        ("mlp.router.", "router"),
    ):
        if mark in name:
            return kind
    return "mlp"
