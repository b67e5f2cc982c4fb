"""Families against published models: config.json is accepted, and the parameter count matches their files."""

from typing import Any

import pytest

from tasuki.models.known import FAMILIES, read_model, read_whole_model
from tasuki.wire.errors import UnsupportedModel

NOTES = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GLM_EXPERTS = {
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 64, "attention_bias": True, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "initial_context_length": 4096, "tie_word_embeddings": False, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
DEEPSEEK = {
    **LATENT, "q_lora_rank": None, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "auto_map": {},
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707,
}  # fmt: skip
V3 = {
    "q_lora_rank": 1536, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                        "mrope_interleaved": True},
}  # fmt: skip
NEXT: dict[str, Any] = {
    **{key: value for key, value in DELTA.items() if not key.startswith(("mtp", "mamba", "attn_output", "rope"))},
    "decoder_sparse_step": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
    "use_sliding_window": False, "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "qwen3_vl",
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
HYBRID = {"cache_implementation": "hybrid", "attention_bias": False, "attention_dropout": 0.0, "query_pre_attn_scalar": 256}


def table(
    architecture: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int, positions: int, **rest: Any
) -> dict[str, Any]:
    """heads: of queries, and of keys and values."""
    sizes = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    return sizes | NOTES | rest


def hybrid(
    architecture: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], *, is_tied: bool = False, **rest: Any
) -> dict[str, Any]:
    """A vision model of 248,320 tokens, with gated delta nets."""
    text = table(architecture, hidden, inner, layers, heads, 248320, 262144, **DELTA | rest)
    text["layer_types"] = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    large = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304} if hidden != 2560 else {}
    return vision(text, is_tied=is_tied, deepstack_visual_indexes=[], **large)


def qwen3_vl(hidden: int, inner: int) -> dict[str, Any]:
    rope = {"rope_theta": 5000000, "rope_scaling": MROPE}
    text = table("Qwen3VLForConditionalGeneration", hidden, inner, 36, (32, 8), 151936, 262144, head_dim=128, **rope)
    return text | {"attention_bias": False, "attention_dropout": 0.0}


def vision(text: dict[str, Any], *, is_tied: bool, **tower: Any) -> dict[str, Any]:
    """With a vision tower beside it."""
    (architecture,) = text.pop("architectures")
    for key in ("rope_theta", "rope_scaling") if "rope_parameters" in text else ():
        text.pop(key)
    beside = {
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    }
    model_type = text["model_type"].removesuffix("_text")
    whole = {"architectures": [architecture], "model_type": model_type, "tie_word_embeddings": is_tied}
    return {**whole, "text_config": text, "vision_config": VISION | {"out_hidden_size": text["hidden_size"]} | tower, **beside}


def qwen2_5_vl(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab_size: int, **rest: Any) -> dict[str, Any]:
    """Its text is not in a table of its own."""
    rope = {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    window = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": layers}
    text = table(
        "Qwen2_5_VLForConditionalGeneration", hidden, inner, layers, heads, vocab_size, 128000, **rope, **window, **rest
    )
    tower = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": hidden, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    beside = {
        f"{name}_token_id": 151652 + index
        for index, name in enumerate(("vision_start", "vision_end", "vision", "image", "video"))
    }
    return {**text, "model_type": "qwen2_5_vl", "vision_config": tower, **beside}


def gemma4(hidden: int, inner: int, layers: int, heads: tuple[int, int], *, period: int = 6, **rest: Any) -> dict[str, Any]:
    """Every `period`-th layer has full attention."""
    rope = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}  # fmt: skip
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "dtype": "bfloat16", "enable_moe_block": False,
        "expert_intermediate_size": None, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": hidden, "hidden_size_per_layer_input": 256, "intermediate_size": inner,
        "layer_types": ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)],
        "max_position_embeddings": 131072, "model_type": "gemma4_text", "num_attention_heads": heads[0], "num_experts": None,
        "num_global_key_value_heads": None, "num_hidden_layers": layers, "num_key_value_heads": heads[1], "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_parameters": rope, "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": None, "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    }  # fmt: skip
    beside = {"audio_config": None, "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_id": 258883,
              "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
              "video_token_id": 258884, "vision_soft_tokens_per_image": 280, "tie_word_embeddings": True}  # fmt: skip
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", **beside}
    return {**whole, "text_config": text | rest, "vision_config": {"model_type": "gemma4_vision"}}


def gemma3(hidden: int, inner: int, layers: int, **rest: Any) -> dict[str, Any]:
    """As published: what transformers has by default is left out."""
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {"hidden_size": hidden, "intermediate_size": inner, "model_type": "gemma3_text", "num_hidden_layers": layers,
            "rope_scaling": rope, "sliding_window": 1024}  # fmt: skip
    tower = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
             "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}  # fmt: skip
    beside = {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
              "eos_token_id": [1, 106], "initializer_range": 0.02, "torch_dtype": "bfloat16"}  # fmt: skip
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **beside}
    return {**whole, "text_config": text | rest, "vision_config": tower}


# As on huggingface.co: HuggingFaceTB/SmolLM2-135M and SmolLM3-3B, meta-llama/Llama-3.1-8B, Qwen/Qwen2.5-7B, Qwen/Qwen3-8B,
# Qwen/Qwen3-4B-Instruct-2507, Qwen/Qwen3-30B-A3B, Qwen/Qwen3-Coder-30B-A3B-Instruct,
# Qwen/Qwen3-VL-4B-Instruct and -8B-Instruct, Qwen/Qwen3.5-4B, -27B and -35B-A3B,
# Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct,
# Qwen/Qwen3-Next-80B-A3B-Instruct, mistralai/Mistral-7B-v0.3, google/gemma-2-2b, google/gemma-3-1b-it, the text of google/gemma-3-4b-it,
# google/gemma-4-E2B-it, -E4B-it and -31B-it,
# ibm-granite/granite-3.3-8b-instruct, microsoft/phi-4, THUDM/GLM-4-9B-0414, zai-org/GLM-4.5-Air,
# openai/gpt-oss-20b and -120b, deepseek-ai/DeepSeek-V2-Lite and -V3-0324, moonshotai/Moonlight-16B-A3B, zai-org/GLM-4.7-Flash,
# allenai/OLMo-2-1124-7B, mistralai/Mixtral-8x7B-v0.1.
PUBLISHED = [
    (134_515_008, table("LlamaForCausalLM", 576, 1536, 30, (9, 3), 49152, 8192, tie_word_embeddings=True, is_llama_config=True,
                        rope_interleaved=False, pretraining_tp=1, **{"transformers.js_config": {"kv_cache_dtype": "float32"}})),
    (3_075_098_624, table("SmolLM3ForCausalLM", 2048, 11008, 36, (16, 4), 128256, 65536, no_rope_layers=[1, 1, 1, 0] * 9,
                          no_rope_layer_interval=4, mlp_bias=False, attention_bias=False, use_sliding_window=False,
                          layer_types=["full_attention"] * 36, max_window_layers=28, pretraining_tp=2)),
    (8_030_261_248, table("LlamaForCausalLM", 4096, 14336, 32, (32, 8), 128256, 131072, mlp_bias=False, attention_bias=False,
                          rope_scaling={"rope_type": "llama3", **LLAMA3}, tie_word_embeddings=False)),
    (7_615_616_512, table("Qwen2ForCausalLM", 3584, 18944, 28, (28, 4), 152064, 131072, use_sliding_window=False,
                          sliding_window=131072, max_window_layers=28, use_mrope=False, tie_word_embeddings=False)),
    (8_190_735_360, table("Qwen3ForCausalLM", 4096, 12288, 36, (32, 8), 151936, 40960, head_dim=128, use_sliding_window=False,
                          sliding_window=None, max_window_layers=36, attention_bias=False)),
    (4_022_468_096, table("Qwen3ForCausalLM", 2560, 9728, 36, (32, 8), 151936, 262144, head_dim=128, use_sliding_window=False,
                          sliding_window=None, max_window_layers=36, attention_bias=False, tie_word_embeddings=True,
                          rope_theta=5000000)),
    (30_532_122_624, table("Qwen3MoeForCausalLM", 2048, 6144, 48, (32, 4), 151936, 40960, head_dim=128, num_experts=128,
                           num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
                           mlp_only_layers=[], router_aux_loss_coef=0.001, output_router_logits=False)),
    (30_532_122_624, table("Qwen3MoeForCausalLM", 2048, 5472, 48, (32, 4), 151936, 262144, head_dim=128, num_experts=128,
                           num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
                           mlp_only_layers=[], shared_expert_intermediate_size=0, qkv_bias=False, use_qk_norm=True)),
    (3_754_622_976, qwen2_5_vl(2048, 11008, 36, (16, 2), 151936, tie_word_embeddings=True)),
    (8_292_166_656, qwen2_5_vl(3584, 18944, 28, (28, 4), 152064, tie_word_embeddings=False)),
    (4_437_815_808, vision(qwen3_vl(2560, 9728), is_tied=True)),
    (8_767_123_696, vision(qwen3_vl(4096, 12288), is_tied=False, depth=27, hidden_size=1152, intermediate_size=4304,
                           deepstack_visual_indexes=[8, 16, 24])),
    (4_539_265_536, hybrid("Qwen3_5ForConditionalGeneration", 2560, 9216, 32, (16, 4), is_tied=True)),
    (27_356_728_560, hybrid("Qwen3_5ForConditionalGeneration", 5120, 17408, 64, (24, 4), linear_num_value_heads=48)),
    (35_107_181_936, hybrid("Qwen3_5MoeForConditionalGeneration", 2048, 512, 40, (16, 2), num_experts=256, num_experts_per_tok=8,
                            moe_intermediate_size=512, shared_expert_intermediate_size=512)),
    (79_674_391_296, table("Qwen3NextForCausalLM", 2048, 5120, 48, (16, 2), 151936, 262144, **NEXT, rope_theta=10000000,
                           num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512)),
    (7_248_023_552, table("MistralForCausalLM", 4096, 14336, 32, (32, 8), 32768, 32768, sliding_window=None)),
    (2_614_341_888, table("Gemma2ForCausalLM", 2304, 9216, 26, (8, 4), 256000, 8192, head_dim=256, sliding_window=4096,
                          **HYBRID, **CAPPED, **GELU)),
    (999_885_952, table("Gemma3ForCausalLM", 1152, 6912, 26, (4, 1), 262144, 32768, head_dim=256, sliding_window=512,
                        sliding_window_pattern=6, rope_local_base_freq=10000, **HYBRID, **GELU)),
    (3_880_263_168, table("Gemma3ForCausalLM", 2560, 10240, 34, (8, 4), 262208, 131072, head_dim=256, sliding_window=1024,
                          sliding_window_pattern=6, rope_local_base_freq=10000, **HYBRID, **GELU, rope_theta=1000000,
                          rope_scaling={"rope_type": "linear", "factor": 8.0})),
    (3_880_263_168, gemma3(2560, 10240, 34)),
    (11_766_034_176, gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8)),
    (27_009_346_304, gemma3(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168)),
    (4_628_569_344, gemma4(1536, 6144, 35, (8, 1), period=5, num_kv_shared_layers=20, use_double_wide_mlp=True)),
    (7_463_013_376, gemma4(2560, 10240, 42, (8, 2), num_kv_shared_layers=18)),
    (30_697_345_280, gemma4(5376, 21504, 60, (32, 16), attention_k_eq_v=True, num_global_key_value_heads=4, sliding_window=1024,
                            hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_bidirectional_attention="vision")),
    (8_170_864_640, table("GraniteForCausalLM", 4096, 12800, 40, (32, 8), 49159, 131072, attention_bias=False, mlp_bias=False,
                          attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
                          tie_word_embeddings=True)),
    (14_659_507_200, table("Phi3ForCausalLM", 5120, 17920, 40, (40, 10), 100352, 16384, original_max_position_embeddings=16384,
                           sliding_window=None, embd_pdrop=0.0, resid_pdrop=0.0, auto_map={}, attention_bias=False)),
    (9_400_279_040, table("Glm4ForCausalLM", 4096, 13696, 40, (32, 2), 151552, 32768, head_dim=128, attention_bias=True,
                          partial_rotary_factor=0.5, tie_word_embeddings=False)),
    (106_852_245_504, table("Glm4MoeForCausalLM", 4096, 10944, 46, (96, 8), 151552, 131072, head_dim=128, **GLM_EXPERTS,
                            attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=False, tie_word_embeddings=False)),
    *((number, table("GptOssForCausalLM", 2880, 2880, layers, (64, 8), 201088, 131072, num_local_experts=experts, **GPT_OSS))
      for number, layers, experts in ((20_914_757_184, 24, 32), (116_829_156_672, 36, 128))),
    (15_706_484_224, table("DeepseekV2ForCausalLM", 2048, 10944, 27, (16, 16), 102400, 163840, **DEEPSEEK, rope_scaling=YARN,
                           routed_scaling_factor=1.0, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False)),
    (15_960_108_544, table("DeepseekV3ForCausalLM", 2048, 11264, 27, (16, 16), 163840, 8192, **DEEPSEEK, rope_theta=50000.0,
                           rms_norm_eps=1e-5, routed_scaling_factor=2.446, topk_method="noaux_tc", scoring_func="sigmoid",
                           norm_topk_prob=True, num_nextn_predict_layers=0)),
    (671_026_404_352, table("DeepseekV3ForCausalLM", 7168, 18432, 61, (128, 128), 129280, 163840,
                            **DEEPSEEK | V3, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})),
    (29_943_390_976, table("Glm4MoeLiteForCausalLM", 2048, 10240, 47, (20, 20), 154880, 202752,
                           **LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256}, q_lora_rank=768, rms_norm_eps=1e-5,
                           moe_intermediate_size=1536, n_shared_experts=1, num_experts_per_tok=4, routed_scaling_factor=1.8,
                           topk_method="noaux_tc", norm_topk_prob=True, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
                           rope_theta=1000000)),
    (7_298_617_344, table("Olmo2ForCausalLM", 4096, 11008, 32, (32, 32), 100352, 4096, attention_bias=False)),
    (46_702_792_704, table("MixtralForCausalLM", 4096, 14336, 32, (32, 8), 32000, 32768, num_local_experts=8,
                           num_experts_per_tok=2, sliding_window=None, output_router_logits=False, router_aux_loss_coef=0.02)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("num_parameters", "config"), PUBLISHED, ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_a_published_model_is_read_and_counted(num_parameters: int, config: dict[str, Any]) -> None:
    assert read_model(config).shape.num_parameters == num_parameters


def test_quantized_weights_that_are_not_read_are_refused_by_name() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = table("Qwen3ForCausalLM", 2560, 9728, 36, (32, 8), 151936, 262144, head_dim=128)
    for config in (text, hybrid("Qwen3_5ForConditionalGeneration", 2560, 9216, 32, (16, 4), is_tied=True)):
        with pytest.raises(UnsupportedModel, match="give the model in bfloat16"):
            read_model(config | {"quantization_config": fp8})


def test_the_text_of_a_vision_model_alone_is_refused_by_name() -> None:
    text = hybrid("Qwen3_5ForConditionalGeneration", 2560, 9216, 32, (16, 4), is_tied=True)["text_config"]
    with pytest.raises(UnsupportedModel, match="Qwen3_5ForCausalLM is the text of Qwen3_5ForConditionalGeneration alone"):
        read_whole_model(text | {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True})
