"""Converts the node's configuration to SGLang's arguments."""

import json
from collections.abc import Mapping
from typing import Any

from tasuki.config.choices import Choices
from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.paths import model_source
from tasuki.config.schema import NodeConfig, RolloutConfig
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.known import FAMILIES
from tasuki.planner.kv_tokens import graph_requests, running_requests, state_slots
from tasuki.planner.rollout_bytes import MEASURED_FREE
from tasuki.rollout.model import NEXT, ModelFacts
from tasuki.wire.errors import InvalidArgument

# SGLang 0.5.17 accepts prompts of at most context_length - 7 tokens and ends completions at context_length - 2. Asking for this much
# more makes a prompt plus max_new_tokens of exactly our context_length work.
_CONTEXT_SLACK = 8
# On a CPU SGLang would allocate thousands of request slots.
_CPU_RUNNING_REQUESTS = 256
_PLANNED_FRACTION = 1 - MEASURED_FREE
OSS, GEMMA4 = "GptOssForCausalLM", "Gemma4ForConditionalGeneration"
_PLAIN = (OSS, NEXT, "DeepseekV3ForCausalLM")

ADAPTER_ID = "policy"
"""Adapter name in requests, if the engine serves an adapter."""
LORA_BACKEND = "tasuki"
"""Name of our kernels for it, see sglang/adapter.py."""


def engine_arguments(config: NodeConfig, choices: Choices, model: ModelFacts) -> dict[str, Any]:
    """Keyword arguments of SGLang's Engine."""
    rollout = config.rollout
    # Beside tokens the fraction is no bound: an engine that restarts beside resident trainer state finds less memory, but takes the same.
    is_planned = choices.kv_tokens is not None and config.device == "cuda"
    fraction = max(rollout.kv_ratio, _PLANNED_FRACTION) if is_planned else rollout.kv_ratio
    arguments: dict[str, Any] = {
        "model_path": str(model_source(config)),
        "device": config.device,
        "tp_size": rollout.tp_size,
        "dtype": rollout.dtype,
        "context_length": model.context_length + _CONTEXT_SLACK,
        "random_seed": config.seed,
        "mem_fraction_static": fraction,
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        "json_model_override_args": json.dumps(_model_overrides(model)),
        # Replaced by ours, see memory.py.
        "enable_memory_saver": True,
        # SGLang refuses to capture prefill together with a memory saver.
        "disable_prefill_cuda_graph": True,
        # An idle scheduler would otherwise busy-wait on a whole core.
        "sleep_on_idle": True,
        "grammar_backend": "none",
        "log_level": "warning",
        # It would read params.json for a folder that is named like some of Mistral's.
        "model_config_parser": "hf",
    }
    if model.routes is not None:
        arguments["enable_return_routed_experts"] = True
    if model.architecture in FAMILIES and FAMILIES[model.architecture].text_module:
        # Text in, and images as patches: SGLang's processor of images would read some of them otherwise than the trainer. Its tower is to
        # interpolate positions as transformers does.
        arguments |= {"enable_multimodal": False, "enable_precise_embedding_interpolation": True}
    if model.full_attention_interval is not None:
        # Unless given, states would take half of the cache's memory.
        arguments["max_mamba_cache_size"] = state_slots(config)
    if rollout.max_running_requests is not None:
        arguments["max_running_requests"] = rollout.max_running_requests
    if choices.kv_tokens is not None:
        arguments["max_total_tokens"] = choices.kv_tokens + _CONTEXT_SLACK
    if config.served_adapter is not None:
        # SGLang's "auto" would take consolidated.safetensors beside a model.safetensors.
        arguments |= {**_adapter_arguments(config.served_adapter), "load_format": "safetensors"}
    else:
        # Weights are received before anything is served, so loading them from disk would waste time.
        arguments["load_format"] = "dummy"
    if config.device == "cpu":
        arguments |= _cpu_arguments(rollout)
    else:
        arguments |= _gpu_arguments(config)
    if model.architecture == OSS:
        # SGLang gives windows a smaller cache of their own, by a fixed ratio.
        arguments["disable_hybrid_swa_memory"] = True
        if config.device == "cpu" or model.routes is not None:
            # Its experts' default is a kernel for GPUs, which reports no routes.
            arguments["moe_runner_backend"] = "triton"
        if config.device == "cpu":
            # SGLang refuses torch_native for this model, but takes it in the place of intel_amx.
            arguments["attention_backend"] = "intel_amx"
    if model.architecture == GEMMA4:
        arguments["disable_hybrid_swa_memory"] = True  # see sglang/models.py
        if config.device == "cpu":
            arguments["attention_backend"] = "triton"  # replaced by ours, see sglang/scheduler.py
    return {**arguments, **_further(rollout.engine, ours=arguments)}


def _model_overrides(model: ModelFacts) -> Mapping[str, Any]:
    """Keys of config.json that the engine is to read otherwise."""
    # SGLang would use only those of config.json, and its own default (2 for Llama) without any.
    overrides: dict[str, Any] = {"architectures": [model.architecture], "eos_token_id": model.stop_token_ids or None}
    if model.full_attention_interval is not None:  # transformers writes layer_types alone, which SGLang does not read
        keys = {"full_attention_interval": model.full_attention_interval}
        overrides |= {"text_config": keys} if model.rope_theta is None else {**keys, "rope_theta": model.rope_theta}
    if model.architecture == GEMMA4:
        overrides["text_config"] = {"moe_intermediate_size": 0}  # which SGLang divides on a CPU, though there is none
    # Their weights arrive dequantized, and some layers would have config.json's dtype instead of the engine's.
    return overrides | ({"dtype": None, "quantization_config": None} if model.architecture in _PLAIN else {})


def _further(engine: Mapping[str, Any], *, ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments configured by SGLang's names. Raises InvalidArgument for one that the device fixes."""
    further = {name: value for name, value in engine.items() if name != MAX_TOKENS}  # which the planner has counted
    for name in further:
        if name in ours:
            raise InvalidArgument(f"rollout.engine.{name}", f"is set to {ours[name]!r} on this device; remove it")
    return further


def _adapter_arguments(adapter: LoraConfig) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.max_rank,
        "lora_target_modules": list(adapter.targets),
        "lora_backend": LORA_BACKEND,
        # Two slots, the adapter's and the one of requests without an adapter, so that neither evicts the other.
        "max_loras_per_batch": 2,
    }


def _gpu_arguments(config: NodeConfig) -> dict[str, Any]:
    """Only the requests that the plan counts run at once. More would also run without CUDA graphs."""
    at_once, captured = running_requests(config), graph_requests(config)
    # As on a CPU, where SGLang is compared with transformers: fused, they would be experts with a drawn place.
    unfused = {"disable_shared_experts_fusion": True}
    if config.rollout.tp_size > 1 and not config.rollout.engine.get("enable_flashinfer_allreduce_fusion"):
        # SGLang would fuse all-reduces of some families: its workspace is not counted, and its kernels are compiled at the first start.
        unfused["enforce_disable_flashinfer_allreduce_fusion"] = True
    return (
        unfused
        | ({} if config.train is None else {"max_running_requests": at_once})
        | ({} if captured is None else {"cuda_graph_max_bs_decode": captured})
    )


def _cpu_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    return {
        "max_running_requests": rollout.max_running_requests or _CPU_RUNNING_REQUESTS,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        # A CPU has no second processor to overlap with, and overlapping computes an unused extra token per sequence.
        "disable_overlap_schedule": True,
    }
