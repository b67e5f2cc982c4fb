"""Qwen 2 and 3, dense and with experts."""

from typing import Any

from tasuki.models.config_json import Config, size
from tasuki.models.family import Family, attention_biases, refuse_layer_types
from tasuki.models.shape import QkNorm

# SGLang has no sliding window for Qwen2 and Qwen3. Without use_sliding_window the other two keys have no effect.
QWEN_KEYS = {"use_sliding_window": (False,), "sliding_window": None, "max_window_layers": None, "layer_types": None}
_EXPERT_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "norm_topk_prob": (False, True),
    # SGLang has experts in every layer.
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


def _qwen_experts(config: Config) -> dict[str, Any]:
    size(config, "decoder_sparse_step", default=1)  # transformers takes no 1.0
    return {
        **attention_biases(config),
        # transformers 5 writes the first name.
        "num_experts": size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "moe_intermediate_size"),
    }


FAMILIES = (
    # And Qwen2.5.
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        keys=QWEN_KEYS,
        shape={"has_qkv_bias": True},
        checks=(refuse_layer_types,),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        keys={**QWEN_KEYS, "attention_bias": None},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=attention_biases,
        checks=(refuse_layer_types,),
    ),
    # Experts in every layer, separate in a checkpoint.
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={**QWEN_KEYS, "attention_bias": None, **_EXPERT_KEYS},
        shape={"qk_norm": QkNorm.HEAD},
        shape_of=_qwen_experts,
        checks=(refuse_layer_types,),
    ),
)
