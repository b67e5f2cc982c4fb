"""Environment variables that SGLang reads when it is imported; `__main__` sets ours and drops others before that."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tasuki.config.schema import NodeConfig
from tasuki.rollout.model import ModelFacts
from tasuki.wire.errors import UnsupportedModel

# Settings of the engine and of libraries that compute for it. One left in a shell would change log-probs without a word.
_FAMILIES = (
    "SGLANG_", "SGL_", "FLASHINFER_", "FLA_", "TRTLLM_", "VLLM_", "DG_JIT_", "AITER_", "ROCM_QUICK_REDUCE_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "ONEDNN_", "DNNL_",
)  # fmt: skip
_OTHERS = frozenset(
    {
        "ATEN_CPU_CAPABILITY", "CK_MOE", "DISABLE_ADDMM_CUDA_LT", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE",
        "SYNC_TOKEN_IDS_ACROSS_TP", "TIMM_FUSED_ATTN", "USE_TRITON_W8A8_FP8_KERNEL",
    }
)  # fmt: skip
# Where libraries keep files, how they log, how memory and peers are reached: nothing that a number depends on.
_KEPT_ENDS = ("_DIR", "_HOME", "_PATH", "_WORKSPACE_BASE", "_LOGS", "_LOG_LEVEL", "_ALLOC_CONF", "_ARCH_LIST", "_STACKTRACES")
_KEPT_FAMILIES = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCH_FR_")


def foreign_variables(names: Iterable[str]) -> list[str]:
    """Variables that the engine must not inherit, sorted.

    All of SGLang's, and those of torch, CUDA's libraries and kernel packages but for places, logs, allocators and transports. NCCL's and
    OpenMP's stay: they belong to the machine.
    """
    return sorted(name for name in names if _is_foreign(name))


def _is_foreign(name: str) -> bool:
    if name.startswith(("SGLANG_", "SGL_")) or name in _OTHERS:
        return True
    return name.startswith(_FAMILIES) and not name.startswith(_KEPT_FAMILIES) and not name.endswith(_KEPT_ENDS)


def engine_environment(config: NodeConfig, model: ModelFacts, *, temp_dir: Path) -> dict[str, str]:
    """What the engine's processes inherit. temp_dir: private folder for the sockets and files that SGLang makes.

    Raises UnsupportedModel for an architecture that SGLang does not have.
    """
    everywhere = {
        "TMPDIR": str(temp_dir),
        # Ranks of one node need no network. Without these, gloo and NCCL listen on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # A queue of pickles over a TCP port, for kinds of parallelism that we do not use.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        # Everything is on this machine; a look-up would only wait for a network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The check compares free memory that other services of the node hold; admission is the coordinator's.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # SGLang keeps a few positions of its context for itself, see arguments.py.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Importing two hundred models to use one takes seconds.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(model.architecture)),
    }
    if config.device == "cuda":
        return everywhere
    rollout = config.rollout
    return everywhere | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(_cores_of_ranks(rollout.tp_size, rollout.num_threads)),
        "OMP_NUM_THREADS": str(rollout.num_threads),
        # SGLang compiles a few small functions when they are first called, which on a CPU takes a C++ compiler and half a minute.
        "TORCH_COMPILE_DISABLE": "1",
        # The CUDA build of torch brings an NCCL that needs a driver; ranks on a CPU talk over gloo.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
    }


def _other_models(architecture: str) -> list[str]:
    """SGLang's model modules that do not define `architecture`, found by reading their source."""
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    modules = sorted(Path(sglang.submodule_search_locations[0], "srt", "models").glob("*.py"))
    defining = {module for module in modules if f"class {architecture}(" in module.read_text()}
    if not defining:
        raise UnsupportedModel(f"SGLang has no architecture {architecture}", architecture=architecture)
    return [module.stem for module in modules if module not in defining]


def _cores_of_ranks(tp_size: int, num_threads: int) -> list[str]:
    """SGLang wants a list of cores for each rank, "0|1" or "0,1|2,3"; on fewer cores they repeat, and replicas share them."""
    cores = sorted(os.sched_getaffinity(0))
    return [",".join(str(cores[(rank * num_threads + i) % len(cores)]) for i in range(num_threads)) for rank in range(tp_size)]
