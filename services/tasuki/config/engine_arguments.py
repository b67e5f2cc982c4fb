"""SGLang arguments that `[rollout.engine]` refuses, with reasons, and those that use no memory counted by a plan."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from tasuki.algorithms.setting import SettingError
from tasuki.wire.errors import InvalidArgument


def _check_argument(value: object) -> object:
    if not all(isinstance(one, bool | int | float | str) for one in (value if isinstance(value, list) else [value])):
        raise ValueError("give a number, a text, true or false, or a list of them")
    return value


Argument = Annotated[bool | int | float | str | list[bool | int | float | str], BeforeValidator(_check_argument)]

KEYS: Mapping[str, str] = {
    "attention_backend": "rollout.attention_backend",
    "base_gpu_id": "rollout.devices",
    "context_length": "rollout.context_length",
    "device": "device",
    "disable_radix_cache": "rollout.radix_cache",
    "dp_size": "rollout.dp_size",
    "dtype": "rollout.dtype",
    "enable_fp32_lm_head": "rollout.float32_logits",
    "enable_lora": "rollout.lora",
    "enable_metrics": "metrics.engine",
    "gpu_id_step": "rollout.devices",
    "lora_target_modules": "trainer.lora.target_modules",
    "max_lora_rank": "trainer.lora.rank",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.kv_tokens",
    "mem_fraction_static": "rollout.kv_ratio",
    "model_path": "model.path",
    "preferred_sampling_params": "train.temperature, train.top_p and train.top_k",
    "random_seed": "rollout.seed",
    "sampling_backend": "rollout.sampling_backend",
    "tokenizer_path": "model.path",
    "tp_size": "rollout.tp_size",
}
"""The key of ours that sets each argument."""

_WEIGHTS = "the engine's weights are exactly the trainer's"
_PARALLEL = "only rollout.tp_size and rollout.dp_size set an engine's parallelism"
_PORTS = "the engine opens no port; callers reach rollout at rollout.listen"
_PEERS = "the engine listens at no address and connects to none"
_TEXT = "prompts and completions would be in logs"
_FILES = "the engine reads the model's folder alone, and writes only below state_dir"
_CODE = "it can run code of the model's folder, whatever trust_remote_code says"
_TOKENS = "samples must be the policy's own, and continue the whole prompt"
_OURS = "tasuki sets it itself"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "checkpoint_engine_wait_weights_before_ready", "cpu_offload_gb", "decrypted_config_file", "decrypted_draft_config_file",
            "delete_ckpt_after_loading", "enable_weights_cpu_backup", "load_format", "model_checksum", "model_loader_extra_config",
            "modelopt_quant", "quantization", "quantization_param_path", "quantize_and_serve", "rl_quant_profile", "torchao_config",
            "weight_version",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            "attn_cp_size", "dcp_size", "dist_init_addr", "elastic_ep_backend", "elastic_ep_rejoin", "enable_dp_attention",
            "enable_elastic_expert_backup", "enable_eplb", "ep_size", "init_expert_location", "moe_a2a_backend", "moe_dense_tp_size",
            "moe_dp_size", "nnodes", "node_rank", "pp_size", "use_ray",
        ),
        _PARALLEL,
    ),
    **dict.fromkeys(
        (
            "admin_api_key", "api_key", "enable_http2", "enable_ssl_refresh", "engine_info_bootstrap_port", "fastapi_root_path",
            "grpc_http_sidecar_port", "grpc_mode", "host", "nccl_port", "port", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile",
            "ssl_keyfile_password",
        ),
        _PORTS,
    ),
    **dict.fromkeys(
        (
            "enable_adaptive_dispatch_to_encoder", "enable_forward_pass_metrics", "enable_lmcache", "enable_mm_global_cache",
            "enable_trace", "hicache_storage_backend", "hicache_storage_backend_extra_config", "hicache_storage_prefetch_policy",
            "kv_events_config", "modelexpress_config", "mooncake_ib_device", "otlp_traces_endpoint", "tool_server", "trace_modules",
        ),
        _PEERS,
    ),
    **dict.fromkeys(
        (
            "crash_dump_folder", "debug_tensor_dump_input_file", "debug_tensor_dump_layers", "debug_tensor_dump_output_folder",
            "export_metrics_to_file", "export_metrics_to_file_dir", "log_level", "log_level_http", "log_requests",
            "log_requests_format", "log_requests_level", "log_requests_target", "msprobe_dump_config", "spec_trace_dir",
        ),
        _TEXT,
    ),
    **dict.fromkeys(
        (
            "chat_template", "completion_template", "deepep_config", "dllm_algorithm_config", "download_dir",
            "enable_profile_cuda_graph", "expert_distribution_recorder_mode", "file_storage_path", "hisparse_config",
            "lmcache_config_file", "pdmux_config_path",
            "revision", "speculative_adaptive_config", "speculative_ngram_external_corpus_path", "speculative_token_map",
        ),
        _FILES,
    ),
    "model_impl": _CODE,
    **dict.fromkeys(("allow_auto_truncate", "speculative_accept_threshold_acc", "speculative_accept_threshold_single"), _TOKENS),
    **dict.fromkeys(
        (
            "custom_sigquit_handler", "custom_weight_loader", "detokenizer_ipc_name", "detokenizer_worker_num",
            "disable_prefill_cuda_graph",
            "enable_custom_logit_processor", "enable_memory_saver", "enable_metrics_for_all_schedulers",
            "forward_hooks", "grammar_backend", "incremental_streaming_output", "instance_id", "is_embedding",
            "json_model_override_args", "lora_backend", "lora_paths", "max_loras_per_batch", "metrics_ipc_name", "rpc_ipc_name",
            "sampling_defaults", "scheduler_input_ipc_name", "skip_tokenizer_init", "sleep_on_idle", "stat_loggers",
            "tokenizer_ipc_name", "tokenizer_worker_ipc_name", "tokenizer_worker_num", "trust_remote_code",
        ),
        _OURS,
    ),
}  # fmt: skip
_REFUSED_PREFIXES: Mapping[str, str] = {
    "disaggregation_": _PARALLEL,
    "decoupled_spec_": _PEERS,
    "encoder_": _PARALLEL,
    "forward_pass_metrics_": _PEERS,
    "kt_": _WEIGHTS,
    "modelopt_": _WEIGHTS,
    "offload_": _WEIGHTS,
    "remote_instance_": _WEIGHTS,
    "speculative_draft_": 'the weights of a draft model would not be trained; speculative_algorithm = "NGRAM" has none',
}
_SPECULATION = "NGRAM"

_WITHOUT_MEMORY = frozenset(
    {
        "abort_on_priority_when_disabled", "batch_notify_size", "decode_log_interval", "disable_overlap_schedule", "dist_timeout",
        "enable_deterministic_inference", "enable_priority_scheduling", "gc_threshold", "gc_warning_threshold_secs",
        "num_continuous_decode_steps", "numa_node", "prefill_max_requests", "radix_eviction_policy", "schedule_conservativeness",
        "schedule_policy", "scheduler_recv_interval", "served_model_name", "soft_watchdog_timeout", "speculative_ngram_capacity",
        "speculative_ngram_match_type", "speculative_ngram_max_bfs_breadth", "speculative_ngram_max_trie_depth",
        "speculative_ngram_min_bfs_breadth", "stream_interval", "watchdog_timeout",
    }
)  # fmt: skip
"""Arguments that use no GPU memory."""
_COUNTED = frozenset({"disable_cuda_graph", "speculative_algorithm", "speculative_num_draft_tokens"})
"""Arguments that a plan reads."""
# SGLang's default with NGRAM.
_DRAFT_TOKENS = 12

_AT_LEAST_ONE = frozenset(
    {"decode_log_interval", "speculative_ngram_max_bfs_breadth", "speculative_num_draft_tokens", "stream_interval"}
)
"""Numbers that SGLang does not check. With decode_log_interval = 0 its scheduler ends at the first batch, after each restart."""

_TYPES: Mapping[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def check_engine_arguments(arguments: Mapping[str, Argument]) -> None:
    """Raises SettingError naming the first refused argument and the alternative."""
    for name, value in arguments.items():
        field = f"engine.{name}"
        if name in KEYS:
            raise SettingError(field, f"is set by {KEYS[name]}; use that")
        reason = _REFUSED.get(name) or next((why for prefix, why in _REFUSED_PREFIXES.items() if name.startswith(prefix)), None)
        if reason is not None:
            raise SettingError(field, f"is not configurable: {reason}; remove it")
        if name == "speculative_algorithm" and value != _SPECULATION:
            raise SettingError(field, f"is {value!r}; only {_SPECULATION!r} needs no draft model")


def uncounted_arguments(arguments: Mapping[str, Argument]) -> list[str]:
    """Names of arguments that may change memory use but are not counted by a plan."""
    return [name for name in arguments if name not in _WITHOUT_MEMORY | _COUNTED]


DRAFT_BLOCKS = 4
"""Blocks of [drafted tokens, V] in float32 that verification of drafts needs at once, and one more."""


def draft_tokens(arguments: Mapping[str, Argument]) -> int:
    """Tokens that speculative decoding drafts for each request in a step; 0 without it."""
    if "speculative_algorithm" not in arguments:
        return 0
    given = arguments.get("speculative_num_draft_tokens")
    return given if isinstance(given, int) else _DRAFT_TOKENS


def check_argument_values(arguments: Mapping[str, Argument]) -> None:
    """Raises InvalidArgument naming the key of an argument unknown to SGLang, or whose value it does not take.

    Does nothing if SGLang is not installed.
    """
    known = _server_arguments() if arguments else {}
    for name, value in arguments.items():
        field = f"rollout.engine.{name}"
        if known and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidArgument(field, f"SGLang has no such argument{hint}")
        if known and not _takes(known[name], value):
            raise InvalidArgument(field, f"is {value!r}; SGLang takes {ast.unparse(known[name])}")
        if name in _AT_LEAST_ONE and isinstance(value, int) and value < 1:
            raise InvalidArgument(field, f"is {value}; must be at least 1")


def has_sglang() -> bool:
    """Whether SGLang is installed, so that its arguments can be checked."""
    return find_spec("sglang") is not None


@cache
def _server_arguments() -> Mapping[str, ast.expr]:
    """SGLang's ServerArgs with their types, parsed from its source because importing it takes seconds."""
    sglang = find_spec("sglang")
    if sglang is None or sglang.submodule_search_locations is None:
        return {}
    module = ast.parse(Path(sglang.submodule_search_locations[0], "srt", "server_args.py").read_text())
    bodies = [node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    return {
        line.target.id: _declared(line.annotation)
        for body in bodies
        for line in body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _declared(annotation: ast.expr) -> ast.expr:
    """The type in SGLang's `A[type, help]`; the literal choices where the help is an `Arg` that has them."""
    match annotation:
        case ast.Subscript(value=ast.Name("A"), slice=ast.Tuple(elts=[declared, ast.Call(keywords=keywords)])):
            choices = next((one.value for one in keywords if one.arg == "choices"), None)
            return choices if isinstance(choices, ast.List) and _constants(choices) else declared
        case ast.Subscript(value=ast.Name("A"), slice=ast.Tuple(elts=[declared, *_])):
            return declared
    return annotation


def _takes(declared: ast.expr, value: Argument) -> bool:
    """Whether a value is of the declared type, or one of the choices. True for types that TOML cannot express."""
    match declared:
        case ast.List() | ast.Subscript(value=ast.Name("Literal"), slice=ast.Tuple()):
            return value in _constants(declared if isinstance(declared, ast.List) else declared.slice)
        case ast.Name(name) if name in _TYPES:
            return isinstance(value, _TYPES[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Subscript(value=ast.Name("Optional"), slice=inner):
            return _takes(inner, value)
        case ast.Subscript(value=ast.Name("Union"), slice=ast.Tuple(elts=kinds)):
            return any(_takes(kind, value) for kind in kinds)
        case ast.Subscript(value=ast.Name("List" | "list"), slice=inner):
            return isinstance(value, list) and all(_takes(inner, one) for one in value)
    return True


def _constants(choices: ast.expr) -> Sequence[object]:
    """Elements of a list or tuple; empty unless all of them are literal."""
    elements = choices.elts if isinstance(choices, ast.List | ast.Tuple) else []
    values = [one.value for one in elements if isinstance(one, ast.Constant)]
    return values if len(values) == len(elements) else []
