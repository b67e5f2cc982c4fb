"""Published node layouts as starting points, with the shapes of their models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasuki.models.shape import ModelShape, QkNorm
from tasuki.planner.node import GB
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
    """A starting point: a model, GPUs, and keys."""

    model: str
    num_gpus: int
    gpu_bytes: int
    settings: Mapping[str, object]


# Settings from verl's memory documentation: examples/tuning, docs/advance/ppo_lora.rst and its memory-optimization examples. GPU counts
# and models are ours where those give none.
PRESETS = {
    "constrained": Preset(
        "qwen2.5-7b",
        8,
        32 * GB,
        {
            "rollout.kv_ratio": 0.3,
            "rollout.tp_size": 4,
            "rollout.engine.disable_cuda_graph": True,
            "trainer.micro_batch_tokens": 4096,
            "trainer.moments": "host",
        },
    ),
    "balanced": Preset("qwen2.5-7b", 8, 80 * GB, {"rollout.kv_ratio": 0.5}),
    "70b+": Preset(
        "qwen2.5-72b", 8, 141 * GB, {"rollout.kv_ratio": 0.8, "rollout.tp_size": 4, "trainer.reference_on_host": False}
    ),
    "72b-lora": Preset(
        "qwen2.5-72b",
        8,
        80 * GB,
        {
            "trainer.lora.rank": 32,
            "rollout.lora": "adapter",
            "rollout.kv_ratio": 0.4,
            "rollout.tp_size": 8,
            "rollout.context_length": 1536,
            "rollout.max_running_requests": 64,
            # Twice the longest sequence, as verl advises.
            "trainer.micro_batch_tokens": 3072,
        },
    ),
}


def find_preset(name: str) -> Preset:
    """Raises InvalidArgument with the available names."""
    if name not in PRESETS:
        raise InvalidArgument("preset", f"{name!r} is not a preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]
