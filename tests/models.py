"""Tiny checkpoints of the tested architectures, with a character tokenizer, created on demand."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextConfig,
    SmolLM3Config,
)

import tasuki.trainer.modules.qwen_vl  # noqa: F401  registers its class with transformers
from tasuki.models.family import TOWER_KEYS
from tasuki.models.known import find_family
from tasuki.models.shape import LAYER_SCALAR, ROUTER_BIAS
from tasuki.trainer.backends.fsdp.shards import constant_shards
from tasuki.weights.export import Shard, checkpoint_shards
from tests.slices import Cut, by_rows, part_of

PAD, EOS, BOS = 0, 1, 2
# Not a multiple of 64, so that the engine pads its vocabulary; at TP 2 on the last rank only.
VOCAB_SIZE = 131
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
# Shorter than the samples; layers both with and without the window.
_WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Heads of values smaller than those of keys, and angles that yarn stretches.
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_MSCALE = {"mscale": 0.8, "mscale_all_dim": 0.8}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
# Gated delta nets in all layers but the last. Half of each head is rotated.
_DELTA = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
_GEMMA4: dict[str, Any] = {
    **_WINDOW,
    "global_head_dim": 32,
    "layer_types": _WINDOW["layer_types"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "architectures": ["Gemma4ForConditionalGeneration"],
}
WINDOW_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,  # which the engine pads to a multiple of 8
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
IMAGE_TOKEN = 127
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama_tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen2_tied": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=16, tie_word_embeddings=False, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    # Three value heads to a key head, which the engine splits in another way than one, two or four.
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **_SIZES,
        **_DELTA,
        linear_num_value_heads=6,
        tie_word_embeddings=True,
        vision_config=TOWER,
        image_token_id=IMAGE_TOKEN,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
        **_DELTA,
        linear_num_value_heads=4,
        tie_word_embeddings=False,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        vision_config=TOWER,
        image_token_id=IMAGE_TOKEN,
    ),
    # Another base of its rotary embedding than the engine's default.
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SIZES,
        **_DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        linear_num_value_heads=4,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLTextConfig(
        **_SIZES,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        vision_config=WINDOW_TOWER,
        image_token_id=IMAGE_TOKEN,
    ),
    "qwen3_vl": lambda: Qwen3VLTextConfig(
        **_SIZES,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={**_MROPE, "mrope_section": [4, 2, 2]},
        vision_config=TOWER | {"deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE_TOKEN,
    ),
    "mistral": lambda: MistralConfig(**_SIZES, head_dim=24, sliding_window=None),
    "smollm3": lambda: SmolLM3Config(**_SIZES, no_rope_layers=[1, 0]),
    # Caps small enough to matter for these logits, and a scale that is not 1/sqrt(head_dim).
    "gemma2": lambda: Gemma2Config(
        **_SIZES,
        **_WINDOW,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=1.5,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        **_WINDOW,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # The text of a vision model.
    "gemma3_vision": lambda: Gemma3TextConfig(
        **_SIZES,
        **_WINDOW,
        query_pre_attn_scalar=24,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0}},
        architectures=["Gemma3ForConditionalGeneration"],
    ),
    # Full layers with larger heads; the last two share keys and values of those before, have wider MLPs, and all have inputs of their own.
    "gemma4": lambda: Gemma4TextConfig(
        **_SIZES | {"num_hidden_layers": 4},
        **_GEMMA4,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=12,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=1.5,
    ),
    # Full layers with fewer heads, whose values are their keys before the norm.
    "gemma4_dense": lambda: Gemma4TextConfig(
        **_SIZES,
        **_GEMMA4 | {"layer_types": _GEMMA4["layer_types"][:2]},
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "granite": lambda: GraniteConfig(
        **_SIZES,
        attention_multiplier=0.1,
        embedding_multiplier=1.5,
        residual_multiplier=0.4,
        logits_scaling=3.0,
        tie_word_embeddings=True,
    ),
    "phi3": lambda: Phi3Config(**_SIZES),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=16),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_SIZES,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES,
        **_WINDOW,
        rope_parameters={**_YARN, "rope_theta": 150000.0, "truncate": False},
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=7.0,
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**_SIZES, **_LATENT},
        q_lora_rank=None,
        scoring_func="softmax",
        topk_method="greedy",
        rope_parameters=_YARN,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_SIZES, **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        q_lora_rank=20,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_parameters=_YARN | _MSCALE,
    ),
    # Transformers computes with its epsilon in the norms of latent attention.
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**{**_SIZES, **_LATENT, "v_head_dim": 24}, q_lora_rank=20, rms_norm_eps=1e-6),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2),
}

TELLING = {
    "llama", "qwen2_tied", "gemma3", "qwen3_5", "qwen3_next", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4", "qwen2_5_vl", "qwen3_vl"
}  # fmt: skip
"""With ties, windows, gated delta nets, experts, biases, latent attention, fused layers, or towers. Others repeat what these show."""
HYBRID = tuple(kind for kind, config in CONFIGS.items() if "linear_attention" in (getattr(config(), "layer_types", None) or ()))
"""With gated delta nets in some layers."""


def make_model(kind: str, *, seed: int, **settings: float) -> PreTrainedModel:
    """Makes a float32 model whose weights are large enough for every row to matter. settings: changes to CONFIGS."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    config.update(settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = config.architectures or [find_family(type(model).__name__).architecture]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIAS):
                # Not among bfloat16's numbers.
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer))[torch.randperm(len(buffer))] + 1e-4)
            elif name.endswith(LAYER_SCALAR):
                buffer.fill_(0.5 + torch.randint(1, 8, ()).item() / 8)
    return model


def save_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """Writes `model` in bfloat16, but for what published checkpoints have in float32, with the character tokenizer.

    The text of a vision model gets a tower.
    """
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    for name, buffer in copy.named_buffers():
        if name.endswith(ROUTER_BIAS):
            buffer.data = buffer.data.float()
    copy.load_state_dict(model.state_dict())
    if model.config.architectures[0] in _WITH_TOWER:
        copy = with_tower(copy)
    copy.save_pretrained(folder)
    if isinstance(model.config, Qwen3_5MoeTextConfig):
        # transformers takes the experts apart, as published models of this family do not.
        tensors = {name: tensor.clone() for name, tensor in copy.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    char_tokenizer().save_pretrained(folder)
    return folder


_WITH_TOWER: dict[str, tuple[Any, Any]] = {
    architecture.__name__: (config, architecture)
    for config, architecture in (
        (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
        (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
        (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        (Gemma3Config, Gemma3ForConditionalGeneration),
        (Gemma4Config, Gemma4ForConditionalGeneration),
    )
}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_GEMMA4_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "position_embedding_size": 16,
}  # fmt: skip


def with_tower(text: PreTrainedModel) -> PreTrainedModel:
    """transformers' vision model of this text, with the tower beside it, or a new one."""
    config_class, architecture = _WITH_TOWER[text.config.architectures[0]]
    table, own = text.config.to_dict(), getattr(text.config, "vision_config", None)
    if isinstance(text.config, Gemma3TextConfig):
        tower = {"vision_config": _SIGLIP}
    elif isinstance(text.config, Gemma4TextConfig):
        tower = {"vision_config": _GEMMA4_TOWER}
    else:
        tower = {
            "vision_config": TOWER if own is None else own,
            "vision_start_token_id": IMAGE_TOKEN + 1,
            "vision_end_token_id": IMAGE_TOKEN + 2,
        }
    config = config_class(
        text_config={key: value for key, value in table.items() if key not in TOWER_KEYS},
        **tower,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = architecture._from_config(config, dtype=text.dtype)
    if own is not None:
        whole.model.visual.load_state_dict(text.visual.state_dict())
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return whole


def trainer_shards(model: PreTrainedModel, *, rank: int, num_ranks: int, cut: Cut = by_rows) -> list[Shard]:
    """Returns the shards that `rank` holds if every parameter is split by `cut`; by_rows is FSDP2's way."""
    names = find_family(model.config.architectures[0]).checkpoint
    shards: list[Shard] = []
    for name, parameter in model.named_parameters():
        box = cut(tuple(parameter.shape), rank, num_ranks)
        local = part_of(parameter.detach(), box)
        shards += checkpoint_shards(name, tuple(parameter.shape), box.offsets, local, names=names)
    return shards + (constant_shards(model) if rank == 0 else [])


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    for character in string.printable:
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")


def poison(model: torch.nn.Module) -> None:
    """Fills every parameter with NaN, so that anything a sync fails to write shows up."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
