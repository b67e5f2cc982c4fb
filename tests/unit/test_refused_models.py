"""What of a configuration is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from tasuki.config.checks import check_model
from tasuki.config.schema import NodeConfig
from tasuki.models.family import TOWER_KEYS
from tasuki.models.known import read_model
from tasuki.trainer.backends.fsdp.model import correct_latent_norms
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tests.models import CONFIGS
from tests.refusal import refusing
from tests.unit.test_models import model_of, module_of, table_of


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.0625),
        ("embedding_scale", 12),
        ("clip_qkv", 8.0),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0], "long_factor": [2.0]}),
        ("rope_scaling", {"type": "su"}),
    ],
)
def test_a_key_that_changes_the_computation_is_refused_by_name(kind: str, key: str, value: object) -> None:
    table = table_of(module_of(kind), **{key: value})
    with pytest.raises(UnsupportedModel, match=key) as caught:
        read_model(table)
    assert caught.value.metadata == {"architecture": table["architectures"][0], "field": key}


@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_that_compute_nothing_are_accepted(kind: str) -> None:
    module = module_of(kind)
    notes = {
        "torch_dtype": "bfloat16",
        "bos_token_id": 5,
        "attention_dropout": 0.1,
        "_attn_implementation_autoset": True,
        "transformers.js_config": {"dtype": "q4"},
        "logit_scale": None,
        "clip_qkv": False,
    }
    assert read_model(table_of(module, **notes)) == model_of(module)


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_PARTIAL_WINDOWS = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}


# Keys of some families only.
@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "attention_bias", True),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3_moe", "mlp_only_layers", [1]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5", "output_gate_type", "sigmoid"),
        ("qwen3_5", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3_5", "partial_rotary_factor", 0.25),
        ("qwen3_5", "layer_types", ["full_attention", "linear_attention"]),
        ("qwen3_5", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen2_5_vl", "use_sliding_window", True),
        ("qwen2_5_vl", "head_dim", 32),
        ("qwen2_5_vl", "rope_parameters", {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}),
        ("qwen3_vl", "rope_parameters", {"rope_type": "default", "mrope_section": [4, 2, 2]}),
        ("qwen3_vl", "rope_parameters", {"rope_type": "default", "mrope_interleaved": False, "mrope_section": [4, 2, 2]}),
        ("qwen3_next", "attention_bias", True),
        ("qwen3_next", "mlp_only_layers", [1]),
        ("qwen3_next", "tie_word_embeddings", True),
        ("mistral", "sliding_window", 255),
        ("mixtral", "sliding_window", 255),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "head_dim", 24),
        ("mixtral", "tie_word_embeddings", True),
        ("gemma2", "tie_word_embeddings", False),
        ("gemma3", "tie_word_embeddings", False),
        ("mixtral", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("phi3", "sliding_window", 255),
        ("phi3", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.75}),
        ("phi3", "partial_rotary_factor", 0.75),
        ("glm4", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("glm4_moe", "n_group", 2),
        ("glm4_moe", "topk_group", 2),
        ("glm4_moe", "norm_topk_prob", False),
        ("glm4_moe", "tie_word_embeddings", True),
        ("glm4_moe", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("gpt_oss", "swiglu_limit", None),
        ("gpt_oss", "swiglu_limit", 8.0),
        ("gpt_oss", "hidden_act_alpha", 1.0),
        ("gpt_oss", "swiglu_alpha", 1.0),
        ("gpt_oss", "tie_word_embeddings", True),
        ("gpt_oss", "layer_types", ["sliding_attention", "chunked_attention"]),
        *((kind, "n_group", 2) for kind in LATENT if kind != "deepseek_v3"),
        *((kind, "attention_bias", True) for kind in LATENT),
        *((kind, "rope_interleave", False) for kind in LATENT),
        *((kind, "num_key_value_heads", 2) for kind in LATENT),
        *((kind, "v_head_dim", 25) for kind in LATENT),
        *((kind, "head_dim", 16) for kind in LATENT),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "group_limited_greedy"),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "rope_parameters", YARN | {"mscale": 0.7}),
        ("deepseek_v3", "rope_parameters", YARN | {"truncate": False}),
        ("glm4_moe_lite", "first_k_dense_replace", 0),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse", "dense"]),
        ("glm4_moe_lite", "rope_parameters", YARN),
        ("smollm3", "mlp_bias", True),
        ("smollm3", "use_sliding_window", True),
        ("olmo2", "head_dim", 24),
        ("olmo2", "layer_types", ["sliding_attention", "full_attention"]),
        ("gemma2", "layer_types", ["full_attention", "sliding_attention"]),
        ("gemma2", "hidden_act", None),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "layer_types", ["full_attention", "chunked_attention"]),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3", "rope_parameters", {"rope_type": "linear", "factor": 8.0}),
        ("gemma4", "enable_moe_block", True),
        ("gemma4", "use_bidirectional_attention", "all"),
        ("gemma4", "attention_bias", True),
        ("gemma4", "tie_word_embeddings", False),
        ("gemma4", "vocab_size_per_layer_input", 64),
        ("gemma4", "num_global_key_value_heads", 1),
        ("gemma4_dense", "num_global_key_value_heads", None),
        ("gemma4", "num_kv_shared_layers", 3),
        ("gemma4", "num_kv_shared_layers", 5),
        ("gemma4", "num_kv_shared_layers", -1),
        ("gemma4_dense", "num_global_key_value_heads", 3),
        ("gemma4", "global_head_dim", 33),
        ("gemma4", "rope_parameters", _PARTIAL_WINDOWS),
        ("gemma4", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gemma4", "rope_parameters", {"full_attention": {"rope_type": "proportional"}}),
        ("gemma4", "rope_parameters", {each: {"rope_type": "default"} for each in ("full_attention", "sliding_attention")}),
        ("gemma4", "per_layer_config", {"1": {"head_dim": 32}}),
        ("gemma4", "per_layer_config", {"1": {"head_dim": 32}, "3": {"head_dim": 16}}),
        ("gemma4", "per_layer_config", {each: {"head_dim": 32, "sliding_window": 3} for each in "13"}),
        ("gemma4", "per_layer_config", {"1": 3}),
        ("granite", "mlp_bias", True),
        ("granite", "attention_bias", True),
    ],
)
def test_what_a_family_does_not_support_is_refused_by_name(kind: str, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read_model(table_of(module_of(kind), **{key: value}))


def test_values_that_newer_transformers_writes_are_read_where_they_are_the_only_ones() -> None:
    oss, vision = table_of(module_of("gpt_oss")), table_of(module_of("qwen3_vl"))
    axial = {"rope_theta": 10000.0, "rope_type": "axial"}
    assert read_model(oss | {"swiglu_alpha": 1.702}) == read_model(oss)
    assert read_model(vision | {"vision_config": vision["vision_config"] | {"rope_parameters": axial}}) == read_model(vision)


@pytest.mark.parametrize(
    ("kind", "own"), [("gemma4", {"head_dim": 32}), ("gemma4_dense", {"head_dim": 32, "num_key_value_heads": 1})]
)
def test_sizes_of_full_layers_are_read_as_published_models_and_as_newer_transformers_write_them(
    kind: str, own: dict[str, int]
) -> None:
    table = table_of(module_of(kind))
    full = [index for index, each in enumerate(table["layer_types"]) if each == "full_attention"]
    names = {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
    published = {key: value for key, value in table.items() if key != "per_layer_config"} | names
    newer = {key: value for key, value in published.items() if key not in names} | {
        "per_layer_config": {f"{index:02}": own for index in full}
    }
    assert read_model(newer) == read_model(published)
    for key in names:  # what transformers before 5.19 fills in
        with pytest.raises(UnsupportedModel, match="per_layer_config"):
            read_model(newer | {key: 5})


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        *((kind, {key: ...}, key) for kind in LATENT for key in ("q_lora_rank", "kv_lora_rank", "num_key_value_heads")),
        *(
            (kind, {key: ...}, key)
            for kind in LATENT[:2]
            for key in ("scoring_func", "topk_method", "moe_layer_freq", "n_group")
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": ...}, "first_k_dense_replace"),
        # The engine's table of angles has 8 * 32 positions.
        ("deepseek_v3", {"max_position_embeddings": 257}, "max_position_embeddings"),
        # Eight experts, of which each token passes two.
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"n_group": 8}, "n_group"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
    ],
)
def test_what_the_engine_of_latent_attention_reads_is_asked_for(kind: str, changes: dict[str, Any], field: str) -> None:
    table = table_of(module_of(kind)) | changes
    with pytest.raises(InvalidArgument, match=field):
        read_model({key: value for key, value in table.items() if value is not ...})


def test_attention_is_scaled_for_yarn_in_v2_as_in_v3() -> None:
    # transformers scales it for V3 alone; DeepSeek's code and the engine do for both.
    v3 = module_of("deepseek_v3")
    assert v3.model.layers[0].self_attn.scaling > module_of("deepseek_v2").model.layers[0].self_attn.scaling
    v2 = read_model(table_of(module_of("deepseek_v2"), rope_parameters=v3.config.rope_parameters))
    assert v2.attention == model_of(v3).attention


def test_every_norm_of_latent_attention_has_the_epsilon_of_the_configuration() -> None:
    module = module_of("glm4_moe_lite", rms_norm_eps=0.25)
    norms = {name: norm for name, norm in module.named_modules() if hasattr(norm, "variance_epsilon")}
    assert {norm.variance_epsilon for norm in norms.values()} == {1e-6, 0.25}
    correct_latent_norms(module)
    assert {norm.variance_epsilon for norm in norms.values()} == {0.25}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("text_config", {"text_config": None}),
        ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
        ("tie_word_embeddings", {"tie_word_embeddings": False}),
        ("model_type", {"model_type": "qwen3_vl"}),
        ("logit_scale", {"logit_scale": 2.0}),
    ],
)
def test_what_stands_beside_the_text_of_a_vision_model_is_read_or_refused_by_name(key: str, changes: dict[str, Any]) -> None:
    text = table_of(module_of("qwen3_5")) | {"architectures": None}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    whole |= {key: text.pop(key) for key in TOWER_KEYS} | {"tie_word_embeddings": True}
    assert read_model(whole) == model_of(module_of("qwen3_5"))
    with pytest.raises(InvalidArgument if key == "text_config" else UnsupportedModel) as refused:
        read_model(whole | changes)
    assert refused.value.metadata["field"] == key


_SERVED_ADAPTER = {"trainer": {"lora": {"target_modules": ["down_proj"]}}, "rollout": {"lora": "adapter"}}


@pytest.mark.parametrize(
    ("kind", "field", "settings"),
    [
        ("qwen3_5", "trainer.sequence_parallel", {"trainer": {"num_ranks": 2, "sequence_parallel": 2}}),
        ("qwen3_5", "trainer.prefix_sharing", {"trainer": {"prefix_sharing": True}}),
        ("qwen3_5", "trainer.compile", {"trainer": {"compile": "blocks"}}),
        ("qwen3_5", "rollout.tp_size", {"rollout": {"tp_size": 4}}),
        ("qwen3_5", "rollout.lora", _SERVED_ADAPTER),
        ("gemma3_vision", "rollout.lora", _SERVED_ADAPTER),
        ("gemma4", "rollout.lora", _SERVED_ADAPTER),
        ("gemma4", "trainer.compile", {"trainer": {"compile": "blocks"}}),
    ],
)
def test_what_gated_delta_nets_and_texts_of_vision_models_cannot_have_is_refused_by_name(
    kind: str, field: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    shape = model_of(module_of(kind)).shape
    plain = {"state_dir": tmp_path, "model": {"path": tmp_path}}
    check_model(NodeConfig.model_validate(plain), shape)
    with refusing(field):
        check_model(NodeConfig.model_validate(plain | settings), shape)


def test_keys_that_a_family_of_old_config_files_leaves_out_have_its_defaults() -> None:
    module = module_of("gemma3")
    table = table_of(module)
    for key in ("layer_types", "tie_word_embeddings", "_sliding_window_pattern"):
        table.pop(key, None)
    model = read_model(table | {"sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
    assert model == model_of(module)


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("qwen3", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("qwen2", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_rope_types_that_both_sides_compute_alike_are_accepted(kind: str, rope: dict[str, Any]) -> None:
    module = module_of(kind)
    assert read_model(table_of(module, rope_parameters=None, rope_scaling=rope, rope_theta=10000.0)) == model_of(module)
