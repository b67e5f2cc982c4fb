"""Published node layouts as starting points, with the shapes of their models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tasuki.models.shape import ModelShape, QkNorm
from tasuki.planner.layout import GB, TAGS, Part
from tasuki.wire.errors import InvalidArgument


def _qwen2_5(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **rest: Any) -> ModelShape:
    sizes: dict[str, Any] = {"head_dim": 128, "vocab_size": 152_064, **rest}
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        has_qkv_bias=True,
        context_length=32_768,
        **sizes,
    )


MODELS = {
    # config.json of Qwen/Qwen2.5-<size>-Instruct on huggingface.co.
    "qwen2.5-0.5b": _qwen2_5(896, 4864, 24, 14, 2, head_dim=64, vocab_size=151_936, is_tied=True),
    "qwen2.5-1.5b": _qwen2_5(1536, 8960, 28, 12, 2, vocab_size=151_936, is_tied=True),
    "qwen2.5-3b": _qwen2_5(2048, 11_008, 36, 16, 2, vocab_size=151_936, is_tied=True),
    "qwen2.5-7b": _qwen2_5(3584, 18_944, 28, 28, 4),
    "qwen2.5-32b": _qwen2_5(5120, 27_648, 64, 40, 8),
    "qwen2.5-72b": _qwen2_5(8192, 29_568, 80, 64, 8),
    # config.json of Qwen/Qwen3-30B-A3B.
    "qwen3-30b-a3b": ModelShape(
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        context_length=40_960,
        qk_norm=QkNorm.HEAD,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A starting point: a model, GPUs, and fields of Layout."""

    text: str
    model: str
    num_gpus: int
    gpu_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)


# Settings from verl's memory documentation: examples/tuning, docs/advance/ppo_lora.rst and its memory-optimization examples, which
# shard gradients after every micro-batch. GPU counts and models are ours where those give none.
PRESETS = {
    "constrained": Preset(
        "7B on GPUs of 32 GB: KV ratio 0.3, no CUDA graphs, 4,096 tokens, moments on the host, everything leaves",
        "qwen2.5-7b",
        8,
        32 * GB,
        {
            "kv_ratio": 0.3,
            "tp_size": 4,
            "has_cuda_graphs": False,
            "micro_batch_tokens": 4096,
            "optimizer_on_host": True,
            "released_early": frozenset(TAGS[1:3]),
        },
    ),
    "balanced": Preset(
        "7B on GPUs of 80 GB: KV ratio 0.5, the trainer stays",
        "qwen2.5-7b",
        8,
        80 * GB,
        {"kv_ratio": 0.5, "tp_size": 1, "sleeping": frozenset({Part.ROLLOUT_WEIGHTS, Part.KV_CACHE})},
    ),
    "70b+": Preset(
        "72B, all parameters, on GPUs of 141 GB: KV ratio 0.8, TP 4, everything leaves, reference policy",
        "qwen2.5-72b",
        8,
        141 * GB,
        {"kv_ratio": 0.8, "tp_size": 4, "has_reference": True, "released_early": frozenset(TAGS[1:3])},
    ),
    "72b-lora": Preset(
        "72B by LoRA of rank 32 on GPUs of 80 GB: KV ratio 0.4, TP 8, sequences of 1,536 tokens",
        "qwen2.5-72b",
        8,
        80 * GB,
        {
            "lora_rank": 32,
            "kv_ratio": 0.4,
            "tp_size": 8,
            "context_length": 1536,
            "max_running_requests": 64,
            # Twice the longest sequence, as verl advises.
            "micro_batch_tokens": 3072,
        },
    ),
}


def find_preset(name: str) -> Preset:
    """Raises InvalidArgument with the available names."""
    if name not in PRESETS:
        raise InvalidArgument("preset", f"{name!r} is not a preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]
