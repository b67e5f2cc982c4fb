"""GLM 4, dense and with experts."""

from __future__ import annotations

from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, flag, num_layers, number, size
from tasuki.models.family import Family
from tasuki.models.shape import QkNorm
from tasuki.wire.errors import InvalidArgument

_GLM_KEYS = (
    "attention_bias", "use_qk_norm", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "first_k_dense_replace", "routed_scaling_factor", "num_nextn_predict_layers",
)  # fmt: skip


def _glm_experts(config: Config) -> dict[str, Any]:
    """Experts in all layers but the first, beside an MLP that every token passes."""
    inner = size(config, "moe_intermediate_size")
    first = config.get("first_k_dense_replace", 1)
    if type(first) is not int or first < 0:
        raise InvalidArgument(
            "first_k_dense_replace", f"must be a whole number from 0 in the model's config.json, not {first!r}"
        )
    number(config, "routed_scaling_factor", default=1.0)
    has_drafts = config.get("num_nextn_predict_layers") not in (None, 0)
    return {
        "num_experts": size(config, "n_routed_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": inner,
        "shared_expert_size": inner * size(config, "n_shared_experts", default=1),
        "has_router_bias": True,
        "dense_layers": frozenset(range(min(first, num_layers(config)))),
        "num_draft_layers": size(config, "num_nextn_predict_layers") if has_drafts else 0,
    }


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
            **dict.fromkeys(_GLM_KEYS),
            "norm_topk_prob": (True,),
            "n_group": (1,),
            "topk_group": (1,),
            "tie_word_embeddings": (False,),
        },
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        shape={"joins_rotated": True},
        shape_of=lambda config: {
            **_glm_experts(config),
            "has_qkv_bias": flag(config, "attention_bias"),
            "qk_norm": QkNorm.HEAD if flag(config, "use_qk_norm") else None,
        },
    ),
)
