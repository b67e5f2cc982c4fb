"""config.json values that make transformers fail or compute another model are refused by key."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tasuki.models.known import FAMILIES, read_model
from tasuki.wire.errors import InvalidArgument, TasukiError, UnsupportedModel
from tests.models import CONFIGS, make_model, save_checkpoint
from tests.refusal import refusing

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
NEEDED: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Glm4MoeForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0},
    "DeepseekV2ForCausalLM": {**LATENT, "scoring_func": "softmax", "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {**LATENT, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "Glm4MoeLiteForCausalLM": LATENT,
    "MistralForCausalLM": {"sliding_window": None},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma3ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma3ForConditionalGeneration": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma4ForConditionalGeneration": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
    },
    "Qwen2_5_VLForConditionalGeneration": {"rope_parameters": {"mrope_section": [4, 2, 2]}},
    **{
        f"Qwen3_5{kind}ForConditionalGeneration": {
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
        }
        for kind in ("", "Moe")
    },
    "Qwen3VLForConditionalGeneration": {"rope_parameters": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
}


TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def write_model(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def table_of(architecture: str = "LlamaForCausalLM", **values: object) -> dict[str, Any]:
    """The text alone of a vision model."""
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        **SIZES,
        **NEEDED.get(architecture, {}),
        **values,
    }


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings"]
)
def test_a_key_that_a_model_lacks_is_named(key: str) -> None:
    table = table_of()
    del table[key]
    with refusing(key):
        read_model(table)


@pytest.mark.parametrize(
    "architecture", ["GptOssForCausalLM", "Glm4MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"]
)
def test_heads_that_transformers_would_number_itself_are_asked_for(architecture: str) -> None:
    table = table_of(architecture)
    del table["num_key_value_heads"]
    with refusing("num_key_value_heads"):
        read_model(table)
    with refusing("head_dim"):
        read_model(table_of(architecture, head_dim=None))


def test_gemma_4_needs_both_bases_of_its_rotary_embedding() -> None:
    full, sliding = {"rope_type": "proportional", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    read = partial(table_of, "Gemma4ForConditionalGeneration")
    read_model(read(rope_parameters={"full_attention": full, "sliding_attention": sliding}))
    for other in ({}, {"full_attention": full}, {"full_attention": full, "sliding_attention": {"rope_type": "default"}}):
        with pytest.raises(UnsupportedModel, match="and a rope_theta for"):
            read_model(read(rope_parameters=other))


def test_notes_beside_the_text_of_a_vision_model_are_checked_as_those_of_others() -> None:
    text = table_of("Gemma4ForConditionalGeneration")
    whole = {"architectures": text["architectures"], "model_type": "gemma4", "text_config": text}
    read_model(whole)
    for key, value in (("dtype", []), ("initializer_range", "x"), ("eos_token_id", ["x"])):
        with refusing(key):
            read_model(whole | {key: value})
    del whole["model_type"]
    with refusing("model_type"):
        read_model(whole)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("key", ["is_causal", "rope_is_neox_style"])
def test_a_key_that_is_true_by_default_is_absent_or_true(architecture: str, key: str) -> None:
    assert read_model(table_of(architecture, **{key: True})) == read_model(table_of(architecture))
    for value in (False, None, 0):
        with pytest.raises(UnsupportedModel, match=f"with {key} {value}: .*true only") as refused:
            read_model(table_of(architecture, **{key: value}))
        assert refused.value.metadata["field"] == key


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_base_of_zero_is_refused_also_where_it_is_only_the_default(architecture: str) -> None:
    for key in ("default_theta", "rope_theta"):
        with pytest.raises((UnsupportedModel, InvalidArgument), match=key):
            read_model(table_of(architecture, **{key: 0}))


OF_EVERY_FAMILY = (
    ("rope_scaling", "linear"),
    ("rope_scaling", {"rope_type": ["linear"]}),
    ("rope_parameters", {"rope_theta": None}),
    ("rope_parameters", {"full_attention": None}),
    ("rms_norm_eps", 0),
    ("max_position_embeddings", True),
    ("tie_word_embeddings", 1),
    ("attention_dropout", 2),
    ("num_hidden_layers", 2.0),
)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        *((architecture, key, value) for architecture in FAMILIES for key, value in OF_EVERY_FAMILY),
        ("LlamaForCausalLM", "hidden_size", -1),
        ("LlamaForCausalLM", "hidden_size", 10**30),
        ("LlamaForCausalLM", "vocab_size", "many"),
        ("LlamaForCausalLM", "num_key_value_heads", 3),
        ("LlamaForCausalLM", "num_hidden_layers", 10**9),
        ("LlamaForCausalLM", "head_dim", 0),
        ("LlamaForCausalLM", "head_dim", 15),
        ("Gemma4ForConditionalGeneration", "head_dim", 15),
        ("LlamaForCausalLM", "mlp_bias", 0),
        ("LlamaForCausalLM", "attention_bias", 1),
        ("Glm4MoeForCausalLM", "first_k_dense_replace", -1),
        ("Glm4MoeForCausalLM", "routed_scaling_factor", 0),
        ("Glm4MoeForCausalLM", "n_shared_experts", 0),
        ("Glm4MoeForCausalLM", "num_nextn_predict_layers", True),
        ("Qwen2ForCausalLM", "use_sliding_window", 0),
        ("Qwen2ForCausalLM", "layer_types", 3),
        ("Qwen3MoeForCausalLM", "norm_topk_prob", 1),
        ("Gemma2ForCausalLM", "layer_types", 3),
        ("Gemma3ForCausalLM", "layer_types", ["full_attention", None]),
        ("GptOssForCausalLM", "layer_types", ["full_attention"]),
        ("GptOssForCausalLM", "sliding_window", None),
        ("Phi3ForCausalLM", "sliding_window", "all"),
        ("SmolLM3ForCausalLM", "no_rope_layers", [1]),
        ("SmolLM3ForCausalLM", "no_rope_layer_interval", 0),
        ("Glm4ForCausalLM", "partial_rotary_factor", 0),
        ("Glm4ForCausalLM", "partial_rotary_factor", 1.5),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(architecture: str, key: str, value: object) -> None:
    with pytest.raises((InvalidArgument, UnsupportedModel)) as refused:
        read_model(table_of(architecture, **{key: value}))
    assert refused.value.metadata["field"] == key


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"type": "linear", "factor": 0}, "factor must be a number above 0"),
        ({"type": "linear", "factor": "2"}, "factor must be a number above 0"),
        ({"type": "linear"}, "'linear' needs factor"),
        ({"type": "linear", "factor": 2}, "factor must be a decimal from 1.0"),  # which the engine would iterate over
        ({"type": "linear", "factor": 0.5}, "factor must be a decimal from 1.0"),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'llama3' needs high_freq_factor"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": None}, "beta_fast must be a number above 0"),
        ({"type": "yarn", "factor": 4.0, "truncate": None}, "truncate must be true or false"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": 0}, "the effect of attention_factor"),
    ],
)
def test_a_parameter_of_a_rotary_embedding_that_computes_nothing_or_something_else_is_refused(
    rope: dict[str, Any], problem: str
) -> None:
    with pytest.raises((InvalidArgument, UnsupportedModel), match=problem) as refused:
        read_model(table_of(rope_scaling=rope))
    assert refused.value.metadata["field"] == "rope_scaling"


def test_the_engines_table_of_angles_reaches_every_position() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_model(table_of(rope_scaling=rope, max_position_embeddings=256))
    with pytest.raises(InvalidArgument, match="^max_position_embeddings: must be at most 256"):
        read_model(table_of(rope_scaling=rope, max_position_embeddings=257))


def test_a_token_chooses_among_the_experts_that_there_are() -> None:
    table = table_of("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=4, moe_intermediate_size=8)
    assert read_model(table).shape.experts_per_token == 4
    with pytest.raises(InvalidArgument, match="^num_experts_per_tok: a token cannot choose 4 of 3 experts"):
        read_model(table | {"num_experts": 3})


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters"])
def test_a_fractional_base_is_refused_where_the_engine_rounds_it(key: str) -> None:
    def table(architecture: str, base: float) -> dict[str, Any]:
        return table_of(architecture, **{key: base if key == "rope_theta" else {"rope_type": "default", "rope_theta": base}})

    assert read_model(table("MixtralForCausalLM", 1e6)) == read_model(table("MixtralForCausalLM", 1_000_000))
    assert read_model(table("LlamaForCausalLM", 10000.5))
    with pytest.raises(UnsupportedModel, match=r"rope_theta 10000\.5: the engine rounds it down"):
        read_model(table("MixtralForCausalLM", 10000.5))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_cache", 1), ("bos_token_id", True), ("eos_token_id", ["2"]), ("pad_token_id", "0"), ("pad_token_id", 10**6),
        ("initializer_range", 1), ("transformers_version", 5), ("dtype", "bfloat17"), ("torch_dtype", 16), ("id2label", []),
        ("auto_map", "modeling"),
    ],
)  # fmt: skip
def test_a_note_that_transformers_cannot_read_is_refused_by_key(key: str, value: object):
    with refusing(key):
        read_model(table_of(**{key: value}))


def test_a_number_of_another_kind_or_null_is_refused_or_read_by_transformers(tmp_path: Path) -> None:
    keys = {
        "rms_norm_eps",
        "head_dim",
        "num_key_value_heads",
        "max_window_layers",
        "decoder_sparse_step",
        "query_pre_attn_scalar",
    }
    keys |= {"attn_logit_softcapping", "final_logit_softcapping", "original_max_position_embeddings"}
    refused: set[str] = set()
    for kind in CONFIGS:
        save_checkpoint(make_model(kind, seed=0), tmp_path / kind)
        table = json.loads((tmp_path / kind / "config.json").read_text())
        text = table.get("text_config", {})
        for key in keys & (text or table).keys():
            for value in (1, 1.0, None):
                changed = table | ({"text_config": text | {key: value}} if text else {key: value})
                (tmp_path / kind / "config.json").write_text(json.dumps(changed))
                try:
                    read_model(changed)
                except TasukiError:
                    refused.add(key)
                else:
                    AutoConfig.from_pretrained(tmp_path / kind)
    assert refused == keys
