"""SGLang arguments that `[rollout.engine]` takes, and how a plan counts them."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated

from pydantic import BeforeValidator

from tasuki.algorithms.setting import SettingError


def _check_argument(value: object) -> object:
    if not all(isinstance(one, bool | int | float | str) for one in (value if isinstance(value, list) else [value])):
        raise ValueError("give a number, a text, true or false, or a list of them")
    return value


Argument = Annotated[bool | int | float | str | list[bool | int | float | str], BeforeValidator(_check_argument)]

_OWNED: Mapping[str, str] = {
    "base_gpu_id": "rollout.devices",
    "context_length": "rollout.context_length",
    "device": "device",
    "dp_size": "rollout.dp_size",
    "dtype": "rollout.dtype",
    "enable_lora": "rollout.lora",
    "ep_size": "rollout.tp_size, which splits each expert",
    "gpu_id_step": "rollout.devices",
    "lora_target_modules": "trainer.lora.target_modules",
    "max_lora_rank": "trainer.lora.rank",
    "max_running_requests": "rollout.max_running_requests",
    "mem_fraction_static": "rollout.kv_ratio",
    "model_path": "model.path",
    "random_seed": "seed",
    "tokenizer_path": "model.path",
    "tp_size": "rollout.tp_size",
}
"""The key of ours that sets an argument."""

# No argument that opens a port, reads or writes a file, loads other weights, or logs prompts.
_WITHOUT_MEMORY: Mapping[str, type] = {
    **dict.fromkeys(
        ("abort_on_priority_when_disabled", "disable_overlap_schedule", "disable_radix_cache", "enable_deterministic_inference",
         "enable_metrics", "enable_priority_scheduling"),
        bool,
    ),
    **dict.fromkeys(
        ("batch_notify_size", "decode_log_interval", "dist_timeout", "num_continuous_decode_steps", "prefill_max_requests",
         "scheduler_recv_interval", "speculative_ngram_capacity", "speculative_ngram_max_bfs_breadth",
         "speculative_ngram_max_trie_depth", "speculative_ngram_min_bfs_breadth", "stream_interval"),
        int,
    ),
    **dict.fromkeys(("gc_warning_threshold_secs", "schedule_conservativeness", "soft_watchdog_timeout", "watchdog_timeout"), float),
    **dict.fromkeys(
        ("attention_backend", "decode_attention_backend", "mm_attention_backend", "prefill_attention_backend", "radix_eviction_policy",
         "sampling_backend", "schedule_policy", "served_model_name", "speculative_ngram_match_type"),
        str,
    ),
    **dict.fromkeys(("gc_threshold", "numa_node"), list),
}  # fmt: skip
MAX_TOKENS = "max_total_tokens"
"""Tokens of the KV cache."""
_COUNTED: Mapping[str, type] = {
    MAX_TOKENS: int,
    "disable_cuda_graph": bool, "speculative_algorithm": str, "speculative_num_draft_tokens": int,
}  # fmt: skip
"""Arguments that a plan reads."""
_NOT_COUNTED: Mapping[str, type] = {
    **dict.fromkeys(
        ("disable_chunked_prefix_cache", "disable_cuda_graph_padding", "disable_custom_all_reduce", "disable_flashinfer_autotune",
         "disable_hybrid_swa_memory", "enable_flashinfer_allreduce_fusion", "enable_mixed_chunk", "enable_mscclpp", "enable_nccl_nvls",
         "enable_symm_mem", "enable_torch_compile", "enable_two_batch_overlap", "triton_attention_reduce_in_fp32"),
        bool,
    ),
    **dict.fromkeys(
        ("chunked_prefill_size", "cuda_graph_max_bs_decode", "max_prefill_tokens", "page_size", "torch_compile_max_bs",
         "triton_attention_num_kv_splits", "triton_attention_split_tile_size"),
        int,
    ),
    "swa_full_tokens_ratio": float,
    **dict.fromkeys(
        ("bf16_gemm_backend", "cuda_graph_backend_decode", "deepep_mode", "fp8_gemm_runner_backend", "kv_cache_dtype",
         "moe_runner_backend"),
        str,
    ),
    "cuda_graph_bs_decode": list,
}  # fmt: skip
ALLOWED = {**_WITHOUT_MEMORY, **_COUNTED, **_NOT_COUNTED}
"""Type of each argument that a configuration may give."""
_WORDS = {bool: "true or false", int: "a whole number other than 0", float: "a number", str: "a text", list: "a list"}
_SPECULATION = "NGRAM"
# SGLang's default with NGRAM.
_DRAFT_TOKENS = 12


def check_engine_arguments(arguments: Mapping[str, Argument]) -> None:
    """Raises SettingError naming the first argument that is not taken and the alternative."""
    for name, value in arguments.items():
        field = f"engine.{name}"
        if name in _OWNED:
            raise SettingError(field, f"is set by {_OWNED[name]}; use that")
        if name not in ALLOWED:
            close = get_close_matches(name, ALLOWED, n=1)
            hint = f"did you mean {close[0]}?" if close else "tasuki.config.engine_arguments lists those it takes"
            raise SettingError(field, f"is no SGLang argument that tasuki takes; {hint}")
        if not _takes(ALLOWED[name], value):
            raise SettingError(field, f"is {value!r}; give {_WORDS[ALLOWED[name]]}")
        if name == MAX_TOKENS and isinstance(value, int) and value < 1:
            raise SettingError(field, f"is {value}; give a number of at least 1")
        if name == "speculative_algorithm" and value != _SPECULATION:
            raise SettingError(field, f"is {value!r}; only {_SPECULATION!r} needs no draft model")


def _takes(kind: type, value: Argument) -> bool:
    """Whether the value is of its kind. With decode_log_interval = 0 SGLang's scheduler ends at the first batch, after each restart."""
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and (kind is float or value != 0)
    return isinstance(value, kind)


def uncounted_arguments(arguments: Mapping[str, Argument]) -> list[str]:
    """Names of arguments that may change memory use but are not counted by a plan."""
    return [name for name in arguments if name in _NOT_COUNTED]


DRAFT_BLOCKS = 4
"""Blocks of [drafted tokens, V] in float32 that verification of drafts needs at once, and one more."""


def draft_tokens(arguments: Mapping[str, Argument]) -> int:
    """Tokens that speculative decoding drafts for each request in a step; 0 without it."""
    if "speculative_algorithm" not in arguments:
        return 0
    given = arguments.get("speculative_num_draft_tokens")
    return given if isinstance(given, int) else _DRAFT_TOKENS
