"""Every private name of SGLang that tasuki/rollout/sglang replaces, overrides or reads: a test fails where a version moves one."""

import ast
import inspect
from functools import cache
from importlib import import_module
from textwrap import dedent
from types import CodeType
from typing import Any

import pytest

SCHEDULER = "srt.managers.scheduler"
MANAGER = "srt.managers.tokenizer_manager"
RUNNER = "srt.model_executor.model_runner"
SAVER = "srt.utils.torch_memory_saver_adapter"

# Replaced or overridden, beside the module that reads it: elsewhere a replacement would have no effect.
REPLACED = [
    ("srt.configs.model_config", "get_generation_config"),
    ("srt.constrained.xgrammar_backend", "XGrammarGrammar.allocate_vocab_mask", "srt.sampling.sampling_batch_info"),
    ("srt.constrained.xgrammar_backend", "XGrammarGrammar.apply_vocab_mask", "srt.constrained.base_grammar_backend"),
    ("srt.entrypoints.engine", "Engine._launch_detokenizer_subprocesses"),
    ("srt.entrypoints.engine", "Engine._launch_scheduler_processes"),
    (
        "srt.layers.attention.attention_registry",
        "ATTENTION_BACKENDS",
        "srt.model_executor.model_runner_components.attention_backend_setup",
    ),
    ("kernels.ops.attention.fla.fused_norm_gate", "_use_cpu"),
    ("kernels.ops.attention.fla.layernorm_gated", "_use_cpu"),
    ("srt.models.mixtral", "MixtralMoE.__init__"),
    ("srt.models.qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration.get_image_feature"),
    ("srt.models.qwen2_5_vl", "Qwen2_5_VisionTransformer.forward"),
    ("srt.models.qwen3_vl", "Qwen3VLMoeVisionModel"),
    ("srt.models.gemma3_mm", "SiglipVisionModel"),
    ("srt.models.gemma3_mm", "Gemma3MultiModalProjector"),
    ("srt.models.gemma4_causal", "Gemma4Attention.__init__"),
    ("srt.models.gemma4_mm", "Gemma4AudioEncoder"),
    ("srt.models.gemma4_mm", "Gemma4ForConditionalGeneration.forward"),
    ("srt.models.gemma4_mm", "Gemma4MultimodalEmbedder"),
    ("srt.models.gemma4_mm", "Gemma4VisionEncoder"),
    ("srt.mem_cache.allocation", "support_triton"),
    ("srt.model_executor.forward_batch_info", "support_triton"),
    ("srt.mem_cache.memory_pool", "MHATokenToKVPool._create_buffers_normal"),
    ("srt.mem_cache.memory_pool", "MHATokenToKVPool._store_kv_layer"),
    ("srt.model_executor.pool_configurator", "DefaultPoolConfigurator._compute_cell_size"),
    ("srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend._run_sdpa_forward_decode"),
    ("srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend._run_sdpa_forward_extend"),
    (
        "srt.layers.attention.torch_native_backend",
        "TorchNativeAttnBackend.forward_decode",
        "srt.layers.attention.base_attn_backend",
    ),
    (
        "srt.layers.attention.torch_native_backend",
        "TorchNativeAttnBackend.forward_extend",
        "srt.layers.attention.base_attn_backend",
    ),
    ("srt.layers.attention.triton_backend", "TritonAttnBackend", "srt.layers.attention.attention_registry"),
    ("srt.layers.logits_processor", "LogitsProcessor._compute_lm_head"),
    ("srt.layers.moe.fused_moe_native", "swiglu_gpt_oss_sigmoid_alpha"),
    ("srt.layers.rotary_embedding.factory", "get_rope_cpu"),
    ("srt.layers.sampler", "multinomial_with_seed"),
    ("srt.lora.backend.base_backend", "BaseLoRABackend.prepare_lora_batch", "srt.lora.lora_manager"),
    ("srt.lora.backend.base_backend", "BaseLoRABackend.run_gate_up_lora", "srt.lora.layers"),
    ("srt.lora.backend.base_backend", "BaseLoRABackend.run_lora_a_sgemm", "srt.lora.layers"),
    ("srt.lora.backend.base_backend", "BaseLoRABackend.run_lora_b_sgemm", "srt.lora.layers"),
    ("srt.lora.backend.base_backend", "BaseLoRABackend.run_qkv_lora", "srt.lora.layers"),
    (SCHEDULER, "Scheduler"),
    (SCHEDULER, "Scheduler.get_init_info"),
    (SCHEDULER, "Scheduler.init_grammar_manager"),
    (SCHEDULER, "Scheduler.init_tokenizer"),
    (SCHEDULER, "Scheduler.maybe_sleep_on_idle"),
    (SCHEDULER, "create_load_snapshot_writer"),
    (RUNNER, "LoRAManager"),
    (RUNNER, "ModelRunner.alloc_memory_pool", "srt.managers.tp_worker"),
    (RUNNER, "ModelRunner.init_cuda_graphs", "srt.managers.tp_worker"),
    (RUNNER, "ModelRunner.load_model"),
    ("srt.model_executor.model_runner_components.load_model_utils", "get_model_loader"),
    ("srt.model_loader.loader", "DefaultModelLoader.load_model", "srt.model_executor.model_runner_components.load_model_utils"),
    ("srt.model_loader.loader", "DefaultModelLoader.load_weights_and_postprocess"),
    ("srt.models.gpt_oss", "GptOssAttention"),
    (
        "srt.models.deepseek_common.deepseek_weight_loader",
        "DeepseekV2WeightLoaderMixin.post_load_weights",
        "srt.models.glm4_moe_lite",
    ),
    ("srt.models.deepseek_common.deepseek_weight_loader", "should_async_load"),
    (
        "srt.models.deepseek_v2",
        "DeepseekV2AttentionMLA.w_kc",
        "srt.models.deepseek_common.attention_forward_methods.forward_mla",
    ),
    (
        "srt.models.deepseek_v2",
        "DeepseekV2AttentionMLA.w_vc",
        "srt.models.deepseek_common.attention_forward_methods.forward_mla",
    ),
    ("srt.models.llama", "LlamaAttention"),
    ("srt.state_capturer.base", "BaseDeviceCache"),
    ("srt.state_capturer.base", "BaseHostCache"),
    ("srt.speculative.base_spec_worker", "BaseSpecWorker.clear_cache_pool", SCHEDULER),
    (SAVER, "TorchMemorySaverAdapter.create", RUNNER),
    (SAVER, "TorchMemorySaverAdapter.cuda_graph", "srt.model_executor.runner_backend.full_cuda_graph_backend"),
    (SAVER, "TorchMemorySaverAdapter.region", "srt.mem_cache.memory_pool"),
]

# Read or called by us, and attributes that an object's class sets.
READ = [
    ("srt.entrypoints.engine", "Engine.tokenizer_manager"),
    ("srt.entrypoints.engine", "Engine._scheduler_init_result"),
    ("srt.environ", "envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
    ("srt.environ", "envs.SGLANG_DISABLED_MODEL_ARCHS"),
    ("srt.environ", "envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"),
    ("srt.environ", "envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"),
    ("srt.environ", "envs.SGLANG_MAMBA_CONV_DTYPE"),
    ("srt.environ", "envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH"),
    ("srt.environ", "envs.SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"),
    ("srt.layers.logits_processor", "should_apply_lm_head_quant_method"),
    ("srt.layers.rotary_embedding.factory", "get_rope"),
    ("srt.lora.lora_manager", "LoRAManager.base_hf_config"),
    ("srt.lora.lora_manager", "LoRAManager.fetch_new_loras"),
    ("srt.lora.lora_manager", "LoRAManager.load_lora_adapter_from_tensors"),
    ("srt.lora.lora_manager", "LoRAManager.lora_modules"),
    ("srt.lora.lora_manager", "LoRAManager.memory_pool"),
    ("srt.lora.mem_pool", "LoRAMemoryPool.A_buffer"),
    ("srt.lora.mem_pool", "LoRAMemoryPool.B_buffer"),
    ("srt.lora.mem_pool", "LoRAMemoryPool.get_buffer_id"),
    ("srt.managers.io_struct", "BatchTokenizedGenerateReqInput"),
    ("srt.managers.io_struct", "GenerateReqInput.lora_id"),
    ("srt.managers.io_struct", "GenerateReqInput.normalize_batch_and_arguments"),
    (SCHEDULER, "Scheduler.draft_worker"),
    (SCHEDULER, "Scheduler.enable_overlap"),
    (SCHEDULER, "Scheduler.flush_cache"),
    (SCHEDULER, "Scheduler.forward_stream"),
    (SCHEDULER, "Scheduler.grammar_manager"),
    (SCHEDULER, "Scheduler.is_fully_idle"),
    (SCHEDULER, "Scheduler.max_running_requests"),
    (SCHEDULER, "Scheduler.pool_stats_observer"),
    (SCHEDULER, "Scheduler.req_to_token_pool"),
    (SCHEDULER, "Scheduler.request_receiver"),
    (SCHEDULER, "Scheduler.running_batch"),
    (SCHEDULER, "Scheduler.schedule_stream"),
    (SCHEDULER, "Scheduler.spec_algorithm"),
    (SCHEDULER, "Scheduler.token_to_kv_pool_allocator"),
    (SCHEDULER, "Scheduler.tp_worker"),
    (SCHEDULER, "Scheduler.waiting_queue"),
    ("srt.managers.scheduler_components.pool_stats_observer", "PoolStats.get_kv_token_stats"),
    ("srt.managers.scheduler_components.pool_stats_observer", "SchedulerPoolStatsObserver.get_pool_stats"),
    ("srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests"),
    ("srt.managers.mm_utils", "init_mm_embedding_cache"),
    ("srt.mem_cache.multimodal_cache", "MultiModalStaticCache.clear"),
    (MANAGER, "ReqState.event"),
    (MANAGER, "ReqState.finished"),
    (MANAGER, "ReqState.out_list"),
    (MANAGER, "TokenizerManager._create_tokenized_object"),
    (MANAGER, "TokenizerManager._dispatch_to_scheduler"),
    (MANAGER, "TokenizerManager._init_req_state"),
    (MANAGER, "TokenizerManager._send_batch_request"),
    (MANAGER, "TokenizerManager._subprocess_watchdog"),
    (MANAGER, "TokenizerManager.auto_create_handle_loop"),
    (MANAGER, "TokenizerManager.rid_to_state"),
    (MANAGER, "TokenizerManager.send_to_scheduler"),
    (RUNNER, "ModelRunner.lora_manager"),
    ("srt.mem_cache.memory_pool", "MHATokenToKVPool.get_kv_size_bytes"),
    ("srt.mem_cache.memory_pool", "ReqToTokenPool.req_to_token"),
    ("srt.models.deepseek_common.attention_backend_handler", "AttentionBackendRegistry.register"),
    ("srt.models.deepseek_common.attention_forward_methods.forward_methods", "AttnForwardMethod.MLA"),
    ("srt.model_executor.runner_utils.pool", "set_global_graph_memory_pool"),
    ("srt.runtime_context", "RuntimeContext.override"),
]


@cache
def loaded(module: str) -> Any:
    return import_module(f"sglang.{module}")


@cache
def names_read_by(module: str) -> frozenset[str]:
    """Globals and attributes that functions of the module read."""
    found: set[str] = set()
    codes = [compile(inspect.getsource(loaded(module)), module, "exec")]
    while codes:
        code = codes.pop()
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        codes += inner
        for one in inner:
            found.update(one.co_names)
    return frozenset(found)


def has(module: str, path: str) -> bool:
    owner: Any = loaded(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}) or name in getattr(owner, "__struct_fields__", ()):
        return True
    return inspect.isclass(owner) and any(name in attributes_set_by(each) for each in owner.__mro__)


def attributes_set_by(owner: type) -> set[str]:
    if not owner.__module__.startswith("sglang."):
        return set()
    nodes = ast.walk(ast.parse(dedent(inspect.getsource(owner))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda entry: entry[1])
def test_what_tasuki_replaces_is_there_and_read_by_sglang(replaced: tuple[str, ...]):
    module, path, *readers = replaced
    assert has(module, path)
    reader = readers[0] if readers else module
    assert path.rpartition(".")[2] in names_read_by(reader), f"{reader} no longer reads {path}"


@pytest.mark.parametrize(("module", "path"), READ, ids=lambda value: value)
def test_what_tasuki_reads_is_there(module: str, path: str):
    assert has(module, path)
