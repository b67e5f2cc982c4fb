"""Description of a model family, for trainer, planner and rollout's recorder; free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, elements, flag, is_number, number, size, unsupported
from tasuki.models.shape import ModelShape
from tasuki.models.tower import TOWER
from tasuki.wire.errors import InvalidArgument, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of a model's layers, besides its sizes."""

    query_scale: float
    """Scale of query-key products."""
    windows: tuple[int | None, ...]
    """Number of tokens visible to a token in each layer, including itself; None for all before it."""
    logit_softcap: float | None = None
    """c in c tanh(x / c) on the scaled products; None if not capped."""
    has_sinks: bool = False
    """See ModelShape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A config.json as read by its family."""

    shape: ModelShape
    attention: Attention
    rotary_buffers: tuple[str, ...] = ("inv_freq", "original_inv_freq")
    """Buffers of the module `model.rotary_emb`, which computes them from the configuration."""
    constant_buffers: Mapping[str, float] = field(default_factory=dict)
    """Other buffers by full name, with their values. The rest is in the checkpoint, see ModelShape.constants."""
    final_logit_softcap: float | None = None
    """c in c tanh(x / c) on the logits before the temperature; None if not capped."""

    def buffers(self) -> frozenset[str]:
        """Full names of all buffers."""
        return (
            frozenset(self.constant_buffers)
            | self.shape.constants().keys()
            | {f"{ROTARY}.{name}" for name in self.rotary_buffers}
            | (frozenset() if self.shape.tower is None else {f"{TOWER}rotary_pos_emb.inv_freq"})
        )


_EXPERTS = ".mlp.experts."
_DECODER = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Names of a checkpoint's tensors. Experts are separate: `<block>.experts.<index>.<gate>.weight`.

    transformers has them as `mlp.experts.gate_up_proj` [E, 2 I, H], gate first, and `mlp.experts.down_proj` [E, H, I].
    """

    decoder: str = "model"
    """Of the decoder, which is `model` in the text model's module."""
    tower: str = "model.visual."
    """Start of the names of a vision tower's tensors."""
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    has_whole_experts: bool = False
    """Whether a checkpoint has the experts of a layer in one tensor, as transformers does."""

    def tensor(self, parameter: str) -> str:
        """Checkpoint name of a parameter other than an expert's."""
        if parameter.startswith(TOWER):
            return self.tower + parameter.removeprefix(TOWER)
        name = parameter.replace(".mlp.", f".{self.block}.")
        return f"{self.decoder}.{name.removeprefix(_DECODER)}" if name.startswith(_DECODER) else name

    def fused(self, parameter: str) -> tuple[str, ...]:
        """Parts of one expert's rows in a fused parameter, in order; empty if the parameter is not fused."""
        _, experts, name = parameter.rpartition(_EXPERTS)
        if not experts or self.has_whole_experts:
            return ()
        return {"gate_up_proj": (self.gate, self.up), "down_proj": (self.down,)}.get(name, ())

    def expert(self, parameter: str, index: int, part: str) -> str:
        """Checkpoint name of one part of expert `index`."""
        layer, _, _ = parameter.rpartition(_EXPERTS)
        layer = layer.replace(_DECODER, f"{self.decoder}.", 1)
        return f"{layer}.{self.block}.experts.{index}.{part}.weight"


def full_attention(shape: ModelShape) -> Attention:
    """Causal attention over all tokens, scaled by the root of the head size."""
    return Attention(query_scale=shape.head_dim**-0.5, windows=(None,) * shape.num_layers)


def _plain(_: Config, shape: ModelShape) -> Model:
    return Model(shape=shape, attention=full_attention(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture of transformers that the tests have trained and published.

    Its functions raise InvalidArgument for a missing or invalid key, UnsupportedModel for one that changes the model.
    """

    architecture: str
    model_type: str
    """Value of this key in config.json, by which transformers chooses the class to build."""
    keys: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    """Extra keys of config.json and their supported values; None for any value."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Further refusals."""
    rope_types: frozenset[str] = rope.SCALED
    rope_parameters: frozenset[str] = frozenset()
    """Further parameters of scaled types."""
    has_partial_rope: bool = False
    """Whether only a part of each head may be rotated."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `decoder_shape`."""
    shape_of: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Further ones that depend on config.json."""
    model_of: Callable[[Config, ModelShape], Model] = _plain
    checkpoint: CheckpointNames = field(default_factory=CheckpointNames)
    text_module: str = ""
    """For a checkpoint with a vision tower, transformers' class of its text alone, which config.json describes in `text_config`."""
    has_tower: bool = False
    """Whether the tower is loaded, for images."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values of keys that `text_config` may lack."""
    decoder_beside_tower: str = "model"
    """Name of the decoder in the vision model that transformers loads, which PEFT's files have."""
    untrained: tuple[str, ...] = ()
    """Starts of names of a checkpoint's tensors that are neither loaded nor trained, and exported unchanged."""
    rope_notes: frozenset[str] = frozenset()
    """Parameters of the rotary embedding that have no effect on text."""

    def adapter_decoder(self, *, has_tower: bool) -> str:
        """Name of the decoder in PEFT's files. has_tower: whether the model is loaded with its vision tower."""
        return self.decoder_beside_tower if has_tower or not self.has_tower else "model"


ROTARY = "model.rotary_emb"

_DECODER_KEYS: dict[str, tuple[Any, ...] | None] = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": None,
    "max_position_embeddings": None,
    "rms_norm_eps": None,
    "tie_word_embeddings": None,
    # The trainer computes without dropout, like the engine.
    "attention_dropout": None,
    "hidden_act": ("silu",),
    **dict.fromkeys(rope.KEYS),
}
# Limits of sequences and of training, and how weights are stored, which leave results as they are.
_LIMITS = frozenset({"max_position_embeddings", "attention_dropout", "quantization_config"})
# Keys without effect on computation. Those that start with "_" are transformers' own notes.
_KEYS_WITHOUT_EFFECT = frozenset({
    "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "auto_map", "tokenizer_class",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "initializer_range", "pretraining_tp", "use_cache",
    "cache_implementation", "id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states", "problem_type",
    "task_specific_params", "output_router_logits", "router_aux_loss_coef", "is_llama_config", "transformers.js_config",
    "unsloth_fixed", "unsloth_version", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "num_return_sequences", "length_penalty", "repetition_penalty", "diversity_penalty",
})  # fmt: skip

# What transformers refuses in some of these once services start.
_IDS, _FLAG, _TEXT, _CAP = (int, type(None)), (bool, type(None)), (str, type(None)), (float, type(None))
_KINDS_OF_NOTES: Mapping[str, tuple[type, ...]] = {
    "architectures": (list,), "transformers_version": _TEXT, "bos_token_id": _IDS, "pad_token_id": _IDS, "eos_token_id": (*_IDS, list),
    "use_cache": (bool,), "return_dict": _FLAG, "output_hidden_states": _FLAG, "output_router_logits": (bool,), "pretraining_tp": _IDS,
    "rms_norm_eps": (float,), "attn_logit_softcapping": _CAP, "final_logit_softcapping": _CAP,
    "initializer_range": (float,), "router_aux_loss_coef": (float,), "id2label": (dict, type(None)), "label2id": (dict, type(None)),
    "auto_map": (dict, type(None)), "chunk_size_feed_forward": (int,), "is_encoder_decoder": (bool,),
    "routed_scaling_factor": (float,), "router_jitter_noise": (float,),
}  # fmt: skip
# By key, the model types whose class in transformers takes no null.
_NEVER_NULL: Mapping[str, tuple[str, ...]] = {
    "head_dim": ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma2", "gemma3_text", "glm4",
        "glm4_moe", "gpt_oss", "gemma4_text"),
    "max_window_layers": ("qwen2", "qwen3"),
    "num_key_value_heads": ("qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "mistral", "gemma2", "gemma3_text", "glm4",
        "glm4_moe", "mixtral", "gpt_oss", "gemma4_text"),
    "decoder_sparse_step": ("qwen3_moe", "qwen3_next"), "n_shared_experts": ("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"),
    "pretraining_tp": ("glm4_moe_lite",), "no_rope_layer_interval": ("smollm3",),
    **dict.fromkeys(("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
    **dict.fromkeys(("sliding_window", "global_head_dim", "num_kv_shared_layers", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input"), ("gemma4_text",)),
    "query_pre_attn_scalar": ("gemma2", "gemma3_text"), "original_max_position_embeddings": ("phi3",), "intermediate_size": ("qwen3_next",),
}  # fmt: skip
_WHOLE_HEADS = ("llama", "gemma2", "gemma3_text", "deepseek_v2")
"""Model types whose hidden size transformers asks to be a multiple of the number of heads."""
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
_DTYPES = (None, "float32", "bfloat16", "float16", "float64")

# transformers or the engine read these with a default that is not null, false, 0 or empty, so such a value has an effect.
_TRUE_BY_DEFAULT = frozenset({"is_causal", "rope_is_neox_style"})
_NEVER_FALSY = frozenset({"default_theta"})
_PROBABILITIES = ("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop")
_WHOLE_NUMBERS = ("sliding_window", "max_window_layers", "original_max_position_embeddings", "num_experts", "num_local_experts",
    "num_kv_shared_layers", "hidden_size_per_layer_input", "moe_intermediate_size", "top_k_experts")  # fmt: skip


def check_keys(config: Config, family: Family) -> None:
    """Raises UnsupportedModel for a key with an unknown effect and for an unsupported value; InvalidArgument for an impossible
    number.
    """
    known = {"model_type": (family.model_type,), **_DECODER_KEYS, **family.keys}
    if "model_type" not in config:
        raise InvalidArgument(
            "model_type", f"missing in the model's config.json; {family.architecture} has {family.model_type!r}"
        )
    for key, value in config.items():
        if key in _KEYS_WITHOUT_EFFECT or key.startswith("_"):
            continue
        if key in _TRUE_BY_DEFAULT:
            if value is not True:
                raise unsupported(config, key, "trainer and engine agree on true only, which is the default; remove the key")
        elif key not in known:
            if value or key in _NEVER_FALSY:
                raise _unknown(config, key)
        elif (values := known[key]) is not None and not _is_one_of(value, values):
            raise unsupported(config, key, f"trainer and engine agree on {' or '.join(map(repr, values))} only")
    _check_notes(config)
    _check_numbers(config)
    rope.check_rope(
        config,
        types=family.rope_types,
        is_partial=family.has_partial_rope,
        further=family.rope_parameters,
        notes=family.rope_notes,
    )


def _unknown(config: Config, key: str) -> UnsupportedModel:
    if key == "quantization_config":
        return unsupported(config, key, "quantized weights of this family are not read; give the model in bfloat16")
    return unsupported(config, key, "its effect is unknown; unset it if nothing is computed from it")


# Keys of a vision model beside `text_config`, none of which has an effect on text.
_VISION_KEYS = frozenset({
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    "language_model_only", "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "audio_config",
    "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index", "eoa_token_id", "vision_soft_tokens_per_image",
})  # fmt: skip


TOWER_KEYS = ("vision_config", "image_token_id")


def text_config(config: Config, family: Family) -> dict[str, Any]:
    """A vision model's `text_config` as a config.json of its text alone; without one, as Qwen2.5-VL has it, the keys beside the tower's.

    Raises InvalidArgument if it is missing, UnsupportedModel for a key beside it with an unknown effect and for embeddings that are tied
    in one of the two alone.
    """
    text, outer_type = config.get("text_config"), family.model_type.removesuffix("_text")
    if "model_type" not in config:
        raise InvalidArgument("model_type", f"missing in the model's config.json; {family.architecture} has {outer_type!r}")
    if text is None and family.model_type == "qwen2_5_vl_text":
        text = {key: value for key, value in config.items() if key not in _VISION_KEYS} | {"model_type": family.model_type}
    if not isinstance(text, dict):
        raise InvalidArgument("text_config", "must be a table in the model's config.json")
    for key, value in config.items():
        if key == "model_type" and value != outer_type:
            raise unsupported(config, key, f"trainer and engine agree on {outer_type!r} only")
        is_known = key in _VISION_KEYS | _KEYS_WITHOUT_EFFECT | {"model_type", "tie_word_embeddings"} or key.startswith("_")
        if value and not is_known and text.get(key) != value:
            raise _unknown(config, key)
    _check_notes(config)
    text = {**family.text_defaults, **text}
    is_tied = flag(config, "tie_word_embeddings", default=family.text_defaults.get("tie_word_embeddings", False))
    if flag(text, "tie_word_embeddings", default=is_tied) is not is_tied:
        raise unsupported(config, "tie_word_embeddings", "text_config has another value, and trainer and engine read one each")
    beside = {key: config[key] for key in TOWER_KEYS if key in config} if family.has_tower else {}
    return {**text, **beside, "tie_word_embeddings": is_tied, "architectures": [family.architecture]}


def computing_keys(family: Family) -> frozenset[str]:
    """Keys of config.json on which a model's results depend."""
    return frozenset({**_DECODER_KEYS, **family.keys}) - _LIMITS


def _check_notes(config: Config) -> None:
    for key, kinds in _KINDS_OF_NOTES.items():
        if key in config and type(config[key]) not in kinds:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InvalidArgument(key, f"must be {names} in the model's config.json, not {config[key]!r}")
    for key, model_types in _NEVER_NULL.items():
        if key in config and config[key] is None and config["model_type"] in model_types:
            raise InvalidArgument(key, "must not be null in the model's config.json; give a number, or remove the key")
    key = "num_key_value_heads"
    if key not in config and config["model_type"] in _NEVER_NULL[key]:
        raise InvalidArgument(key, "missing in the model's config.json; transformers would take a number of its own")
    if isinstance(config.get("eos_token_id"), list):
        elements(config, "eos_token_id", of=int)
    padding, vocab_size = config.get("pad_token_id"), config.get("vocab_size")
    if padding is not None and isinstance(vocab_size, int) and not -vocab_size <= padding < vocab_size:
        raise InvalidArgument(
            "pad_token_id", f"must be below vocab_size, {vocab_size}, in the model's config.json, not {padding}"
        )
    for key, values in (("dtype", _DTYPES), ("torch_dtype", _DTYPES), ("problem_type", _PROBLEM_TYPES)):
        if config.get(key) not in values:
            raise InvalidArgument(key, f"must be one of {values[1:]} in the model's config.json, not {config[key]!r}")
    labels, ids = config.get("id2label") or {}, (config.get("label2id") or {}).values()
    if not all(str(key).isdecimal() and isinstance(label, str) for key, label in labels.items()):
        raise InvalidArgument("id2label", f"must have a text for each number in the model's config.json, not {labels}")
    if {type(one) for one in ids} not in ({int}, {str}, set()):
        raise InvalidArgument("label2id", f"must have a whole number for each text in the model's config.json, not {[*ids]}")
    for key in ("layer_types", "mlp_layer_types"):
        listed, num_layers = elements(config, key, of=str), config.get("num_hidden_layers")
        if listed is not None and len(listed) != num_layers:
            raise InvalidArgument(key, f"has {len(listed)} entries in the model's config.json, for {num_layers} layers")


def _check_numbers(config: Config) -> None:
    """Checks keys that a family may not read, but that transformers always checks."""
    number(config, "rms_norm_eps", default=1e-6)
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden % heads and config["model_type"] in _WHOLE_HEADS:
        raise InvalidArgument("hidden_size", f"must be a multiple of num_attention_heads, {heads}, not {hidden}")
    for key in _PROBABILITIES:
        value = config.get(key, 0.0)
        is_float = type(value) is float or config["model_type"] != "deepseek_v2"
        if not is_number(value) or not 0 <= value <= 1 or not is_float:
            raise InvalidArgument(key, f"must be from 0 to 1 in the model's config.json, not {value!r}")
    for key in _WHOLE_NUMBERS:
        value = config.get(key)
        if value is not None and type(value) is not int:
            raise InvalidArgument(key, f"must be a whole number or null in the model's config.json, not {value!r}")


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    """Distinguishes true from 1 and false from 0, as transformers does but Python does not."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def attention_biases(config: Config) -> dict[str, Any]:
    """Biases of queries, keys, values and outputs."""
    has_bias = flag(config, "attention_bias")
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias}


def refuse_window(config: Config, *, default: int | None) -> None:
    """Raises UnsupportedModel for a sliding window shorter than sequences may be, if the engine does not support one for the family.

    default: if config.json lacks `sliding_window`.
    """
    window, longest = config.get("sliding_window", default), config.get("max_position_embeddings")
    if isinstance(window, int) and isinstance(longest, int) and window < longest:
        reason = (
            "the engine has no sliding window for this family; lower max_position_embeddings to the window, or set it to null"
        )
        raise unsupported({**config, "sliding_window": window}, "sliding_window", reason)


def refuse_head_dim(config: Config) -> None:
    """Raises UnsupportedModel if the head size differs from the hidden size divided by the number of heads."""
    hidden, heads, head_dim = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and head_dim not in (None, hidden // heads):
        raise unsupported(
            config, "head_dim", f"the engine has hidden_size / num_attention_heads = {hidden // heads} for this family"
        )


def refuse_layer_types(config: Config) -> None:
    """Raises UnsupportedModel unless all layers use full attention."""
    listed = elements(config, "layer_types", of=str)
    if listed is not None and set(listed) - {"full_attention"}:
        raise unsupported(config, "layer_types", "the engine has full attention only for this family")
