"""DeepSeek V2 and V3, and models of their form: latent attention, and experts beside an MLP that every token passes."""

import math
from functools import partial
from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, num_layers, number, size, unsupported
from tasuki.models.family import Attention, Family, Model
from tasuki.models.shape import Latent, ModelShape
from tasuki.wire.errors import InvalidArgument

EXPERT_KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
    "routed_scaling_factor", "num_nextn_predict_layers",
)  # fmt: skip
LATENT_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(EXPERT_KEYS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")),
    # Weights of losses in pretraining, and how its ranks were arranged.
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size")),
    "attention_bias": (False,),
    "rope_interleave": (True,),
    # Neither groups but V3's nor sparse layers between dense ones are tested.
    "n_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
}


def require(config: Config, *, keys: tuple[str, ...]) -> None:
    """Raises InvalidArgument for a key that the engine reads without a default, or with another one than transformers."""
    for key in keys:
        if key not in config:
            raise InvalidArgument(key, "missing in the model's config.json; the engine needs it")


def shared_and_routed(config: Config, *, dense: int = 1, shared: int = 1, has_router_bias: bool = True) -> dict[str, Any]:
    """Experts in all layers but the first, beside an MLP that every token passes.

    dense, shared: number of dense layers and of shared experts, if config.json lacks them.
    """
    inner, first = size(config, "moe_intermediate_size"), config.get("first_k_dense_replace", dense)
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
        "shared_expert_size": inner * size(config, "n_shared_experts", default=shared),
        "has_router_bias": has_router_bias,
        "dense_layers": frozenset(range(min(first, num_layers(config)))),
        "num_draft_layers": size(config, "num_nextn_predict_layers") if has_drafts else 0,
    }


def _check_groups(config: Config) -> None:
    """Raises InvalidArgument unless the chosen groups have enough experts, and each at least two, of which both sides add the scores."""
    experts, groups, chosen = (size(config, key) for key in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise InvalidArgument("n_group", f"{groups} groups need as many experts each, two or more; there are {experts} experts")
    if chosen > groups or size(config, "num_experts_per_tok") > chosen * (experts // groups):
        problem = f"{chosen} of {groups} groups do not have {config['num_experts_per_tok']} experts to choose"
        raise InvalidArgument("topk_group", problem)


def _refuse_other_quantization(config: Config) -> None:
    stored = config.get("quantization_config")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if stored and (not isinstance(stored, dict) or stored != stored | blocks or stored.get("fmt", "e4m3") != "e4m3"):
        raise unsupported(config, "quantization_config", "only fp8 (e4m3) in blocks of 128 x 128 is dequantized")


def latent_attention(config: Config) -> dict[str, Any]:
    """Sizes of latent attention. Raises UnsupportedModel for a head size or heads of keys that they do not give."""
    rope_dim, heads = size(config, "qk_rope_head_dim"), size(config, "num_attention_heads")
    head_dim = size(config, "qk_nope_head_dim") + rope_dim
    for key, value in (("head_dim", rope_dim), ("qk_head_dim", head_dim), ("num_key_value_heads", heads)):
        if config.get(key, value) != value:
            raise unsupported(config, key, f"latent attention has {value}; remove the key")
    if size(config, "v_head_dim") > head_dim:
        raise unsupported(config, "v_head_dim", f"heads of values may not be larger than those of keys, which have {head_dim}")
    rank = config.get("q_lora_rank")
    return {
        "head_dim": head_dim,
        "latent": Latent(
            kv_rank=size(config, "kv_lora_rank"),
            query_rank=None if rank is None else size(config, "q_lora_rank"),
            rope_dim=rope_dim,
            value_dim=size(config, "v_head_dim"),
        ),
    }


def latent_model(config: Config, shape: ModelShape) -> Model:
    """Scales attention for YaRN as DeepSeek's code and the engine do. transformers does so for V3 alone."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scale, table = shape.head_dim**-0.5, config.get(key) or {}
    if table.get("rope_type", table.get("type", "default")) != "default":
        size(table, "original_max_position_embeddings")
        if table.get("truncate", True) is not True:
            raise unsupported(config, key, "the engine truncates the range of yarn for this family; remove truncate")
        # Equal ones leave the angles' length at 1; of one alone, transformers and the engine make different lengths.
        if table.get("mscale") != table.get("mscale_all_dim"):
            raise unsupported(config, key, "mscale must equal mscale_all_dim")
        scale *= (0.1 * table.get("mscale_all_dim", 0.0) * math.log(max(1.0, table["factor"])) + 1) ** 2
    return Model(shape=shape, attention=Attention(query_scale=scale, windows=(None,) * shape.num_layers))


_LATENT: dict[str, Any] = {"rope_types": rope.YARN, "rope_parameters": rope.MSCALES, "model_of": latent_model}
_READ_BY_ENGINE = (
    "q_lora_rank", "num_key_value_heads", "scoring_func", "topk_method", "moe_layer_freq", "n_group", "topk_group",
)  # fmt: skip

FAMILIES = (
    # V2-Lite. Softmax over all experts, whose weights are not normalized.
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        keys={
            **LATENT_KEYS,
            "mlp_bias": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy",),
            "norm_topk_prob": (False,),
        },
        shape_of=lambda config: {
            **latent_attention(config),
            **shared_and_routed(config, dense=0, shared=2, has_router_bias=False),
        },
        checks=(partial(require, keys=_READ_BY_ENGINE),),
        **_LATENT,
    ),
    # V3 and models of its form, such as Moonlight: sigmoids, ranked with a constant bias, in the best groups.
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        keys={
            **LATENT_KEYS,
            "n_group": None,
            "topk_group": None,
            "quantization_config": None,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "norm_topk_prob": (True,),
        },
        shape_of=lambda config: {**latent_attention(config), **shared_and_routed(config, dense=3)},
        checks=(partial(require, keys=_READ_BY_ENGINE), _check_groups, _refuse_other_quantization),
        **_LATENT,
    ),
)
