"""GLM 4, dense and with experts."""

from functools import partial

from tasuki.models import rope
from tasuki.models.config_json import Config, elements, flag, num_layers, unsupported
from tasuki.models.family import Family
from tasuki.models.known.deepseek import EXPERT_KEYS, LATENT_KEYS, latent_attention, latent_model, require, shared_and_routed
from tasuki.models.shape import QkNorm


def _refuse_layer_types(config: Config) -> None:
    first, listed = config.get("first_k_dense_replace"), elements(config, "mlp_layer_types", of=str)
    dense = 1 if listed is None else listed.count("dense")
    if listed is not None and listed != ["dense"] * dense + ["sparse"] * (num_layers(config) - dense):
        raise unsupported(config, "mlp_layer_types", "the engine has dense layers before all others of this family")
    if first != dense:
        raise unsupported(config, "first_k_dense_replace", f"transformers has {dense} dense layers of this family")


FAMILIES = (
    # GLM 4 (0414): rotates half of each head, in adjacent pairs.
    Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        keys={"attention_bias": None},
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        shape={
            "head_dim": 128,
            "post_norms": ("post_self_attn_layernorm", "post_mlp_layernorm"),
            "has_fused_gate_up": True,
            "joins_rotated": True,
        },
        shape_of=lambda config: {"has_qkv_bias": flag(config, "attention_bias", default=True)},
    ),
    # GLM 4.5 and 4.6: rotates half of each head, by halves.
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        keys={
            **dict.fromkeys((*EXPERT_KEYS, "attention_bias", "use_qk_norm")),
            "norm_topk_prob": (True,),
            "n_group": (1,),
            "topk_group": (1,),
            "tie_word_embeddings": (False,),
        },
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        shape={"joins_rotated": True},
        shape_of=lambda config: {
            **shared_and_routed(config),
            "has_qkv_bias": flag(config, "attention_bias"),
            "qk_norm": QkNorm.HEAD if flag(config, "use_qk_norm") else None,
        },
    ),
    # GLM 4.7 Flash: DeepSeek V3's layers.
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        keys={
            **LATENT_KEYS,
            "mlp_layer_types": None,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "norm_topk_prob": (True,),
        },
        rope_types=rope.DEFAULT,
        shape_of=lambda config: {**latent_attention(config), **shared_and_routed(config)},
        model_of=latent_model,
        checks=(partial(require, keys=("q_lora_rank", "num_key_value_heads", "first_k_dense_replace")), _refuse_layer_types),
    ),
)
