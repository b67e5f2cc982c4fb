"""SGLang's model of a folder in this process, by its own loader."""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Job:
    tp_rank: int
    tp_size: int
    address: str | None
    folder: str
    published: bytes
    state_dir: Path | None = None


def models_without_a_test() -> list[str]:
    """Lists SGLang's model modules that no test uses: importing all of them takes half a minute on a busy machine."""
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    modules = Path(sglang.submodule_search_locations[0], "srt", "models").glob("*.py")
    tested = (
        "llama",
        "qwen2",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_next",
        "qwen3_vl",
        "mistral",
        "gemma2",
        "gemma3_causal",
        "gemma3_mm",
        "gemma4_causal",
        "gemma4_mm",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "olmo2",
        "mixtral",
        "deepseek_v2",
        "glm4_moe_lite",
        "granite",
    )
    return [module.stem for module in modules if module.stem not in tested]


def configure(job: Job, *, device: str) -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    if job.address is not None:
        _leave_group()
    table = Path(job.folder, "config.json").read_text()
    is_oss, is_unrotated, is_gemma4 = '"gpt_oss"' in table, '"smollm3"' in table, '"gemma4"' in table
    on_cpu = {
        "attention_backend": "intel_amx" if is_oss else "triton" if is_gemma4 else "torch_native",
        "moe_runner_backend": "triton" if is_oss else "auto",
    }
    args = ServerArgs(
        model_path=job.folder,
        json_model_override_args='{"architectures": ["LlamaForCausalLM"]}' if is_unrotated else "{}",
        device=device,
        tp_size=job.tp_size,
        dtype="bfloat16",
        **(on_cpu if device == "cpu" else {"attention_backend": "triton"}),
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        enable_multimodal=False,
        log_level="error",
    )
    # From 0.5.23 on groups have the sizes and ranks that are published.
    place = getattr(runtime_context, "SpawnRanks", None)
    ranks = {} if place is None else {"ranks": place(world_rank=job.tp_rank, gpu_id=job.tp_rank)}
    runtime_context.publish(args, role="scheduler", **ranks)
    initialize_moe_config(*([args] if signature(initialize_moe_config).parameters else []))  # none from 0.5.23 on
    return args


def load_model(args: Any, loader: Any = None) -> Any:
    """loader: SGLang's own by default."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_loader import get_model_loader

    from tasuki.rollout.sglang.cpu.kernels import install_delta_nets
    from tasuki.rollout.sglang.models import install_gemma4, leave_out_tower

    config = ModelConfig.from_server_args(args)
    architecture = str((config.hf_config.architectures or [""])[0])
    if initialize := getattr(dp_attention, "init_dp_gathered_buffer", None):  # from 0.5.23 on
        dp_attention.initialize_dp_attention(args)
        initialize(config)
    else:
        dp_attention.initialize_dp_attention(args, config)
    # Another model of this process may have a tower.
    with ExitStack() as patched:
        if architecture in ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"):
            from sglang.srt.models import gemma3_mm, gemma4_mm

            leave_out_tower(architecture)
            is_gemma4 = architecture.startswith("Gemma4")
            whole: Any = gemma4_mm.Gemma4ForConditionalGeneration if is_gemma4 else gemma3_mm.Gemma3ForConditionalGeneration
            if is_gemma4:
                install_gemma4()

            def load_text(self: Any, weights: Any, load: Any = whole.load_weights) -> Any:
                return load(self, (each for each in weights if "language_model." in each[0]))

            patched.enter_context(patch.object(whole, "load_weights", load_text))
        if args.device == "cpu" and hasattr(config.hf_text_config, "linear_conv_kernel_dim"):
            install_delta_nets()
            adjust_tp_num_heads_if_necessary(config.hf_text_config, args.tp_size, True)
        made = (get_model_loader if loader is None else loader)(LoadConfig(), config)
        return made.load_model(model_config=config, device_config=DeviceConfig(device=args.device))


def _leave_group() -> None:
    from sglang.srt import distributed

    distributed.parallel_state.destroy_model_parallel()
    distributed.parallel_state.destroy_distributed_environment()


def join_group(job: Job, *, backend: str) -> None:
    """Call it after `configure`, which leaves the group before."""
    from sglang.srt import distributed

    # Weights are loaded without it; it would first exchange buffers.
    distributed.parallel_state.set_custom_all_reduce(False)
    distributed.init_distributed_environment(
        backend=backend, world_size=job.tp_size, rank=job.tp_rank, distributed_init_method=job.address, local_rank=job.tp_rank
    )
    size = "tensor_model_parallel_size"
    join = distributed.initialize_model_parallel
    join(**{size: job.tp_size} if size in signature(join).parameters else {})
