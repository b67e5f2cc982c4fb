"""python -m tasuki.rollout --config node.toml

Spawned engine ranks import this file again, so `main` does the heavy imports. It sets the variables that SGLang reads when imported.
"""

import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path

from tasuki.config import paths
from tasuki.config.environment import cpu_threads
from tasuki.config.gpus import show_gpus
from tasuki.config.load import config_argument, load_config
from tasuki.config.lock import StateLock
from tasuki.config.schema import NodeConfig
from tasuki.rollout.model import ModelFacts, read_model
from tasuki.rollout.ranks import RankProcesses
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.memory import wait_to_leave
from tasuki.rpc.process_start import StartSeconds, StartupDeadline
from tasuki.wire.errors import TasukiError, UnsupportedModel
from tasuki.wire.stages import Service

# Settings of the engine and its compute libraries. One inherited from a shell would silently change log-probs.
_FAMILIES = (
    "SGLANG_", "SGL_", "FLASHINFER_", "FLA_", "TRTLLM_", "VLLM_", "DG_JIT_", "AITER_", "ROCM_QUICK_REDUCE_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "ONEDNN_", "DNNL_",
)  # fmt: skip
_OTHERS = frozenset(
    {
        "ATEN_CPU_CAPABILITY", "CK_MOE", "DISABLE_ADDMM_CUDA_LT", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE",
        "SYNC_TOKEN_IDS_ACROSS_TP", "TIMM_FUSED_ATTN", "USE_TRITON_W8A8_FP8_KERNEL",
        # All metrics, ours too, would go to files of another program.
        "PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir",
    }
)  # fmt: skip
# Locations of files, logging, memory allocation and transports: they do not affect results.
_KEPT_ENDS = ("_DIR", "_HOME", "_PATH", "_WORKSPACE_BASE", "_LOGS", "_LOG_LEVEL", "_ALLOC_CONF", "_ARCH_LIST", "_STACKTRACES")
_KEPT_FAMILIES = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_SYMM_MEM_")


def foreign_variables(names: Iterable[str]) -> list[str]:
    """Variables that the engine must not inherit, sorted.

    Includes all of SGLang's, and those of torch, CUDA libraries and kernel packages, except for paths, logs, allocators and transports.
    NCCL's and OpenMP's stay: they depend on the machine.
    """
    return sorted(name for name in names if _is_foreign(name))


def _is_foreign(name: str) -> bool:
    if name.startswith(("SGLANG_", "SGL_")) or name in _OTHERS:
        return True
    return name.startswith(_FAMILIES) and not name.startswith(_KEPT_FAMILIES) and not name.endswith(_KEPT_ENDS)


def engine_environment(config: NodeConfig, model: ModelFacts, *, temp_dir: Path) -> dict[str, str]:
    """Environment of the engine's processes. temp_dir: private folder for SGLang's sockets and files.

    Raises UnsupportedModel for an architecture unknown to SGLang.
    """
    everywhere = {
        "TMPDIR": str(temp_dir),
        # Ranks of one node need no network. By default gloo and NCCL listen on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # A queue of pickles over a TCP port, used only by kinds of parallelism that we do not use.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        # All files are local; a lookup would only wait for the network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # This check compares free memory, which other services of the node use; admission is up to the coordinator.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # SGLang reserves a few positions of its context, see arguments.py.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # SGLang would keep the latest inputs of convolutions in bfloat16, whatever the model's dtype.
        "SGLANG_MAMBA_CONV_DTYPE": config.rollout.dtype,
        # Avoids importing two hundred models, which takes seconds, to use one.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(model.architecture)),
    }
    if config.rollout.has_engine_metrics:
        everywhere["PROMETHEUS_MULTIPROC_DIR"] = str(paths.engine_metrics_dir(config.state_dir))
    if config.device == "cuda":
        # Ranks would otherwise map the pages of each other's graphs, which move when graphs are paused and resumed.
        return everywhere | {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
    return everywhere | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(_cores_of_ranks(config.rollout.tp_size, cpu_threads())),
        "OMP_NUM_THREADS": str(cpu_threads()),
        # Avoids compiling a few small functions on first call, which on a CPU needs a C++ compiler and takes half a minute.
        "TORCH_COMPILE_DISABLE": "1",
        # The CUDA build of torch loads an NCCL that needs a driver; ranks on a CPU use gloo.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
    }


def cache_variables(state_dir: Path, *, given: Collection[str]) -> dict[str, str]:
    """Variables, unless given, that keep what torch.compile makes of SGLang's functions in the node's private folder for the next start.

    By default it goes to the folder of temporary files, which is removed with the node. Triton's own cache is in the user's home.
    """
    ours = {"TORCHINDUCTOR_CACHE_DIR": str(state_dir.resolve() / "compiled-engine")}
    return {name: value for name, value in ours.items() if name not in given}


def _other_models(architecture: str) -> list[str]:
    """SGLang's model modules that do not define `architecture`, found by searching their source."""
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    modules = sorted(Path(sglang.submodule_search_locations[0], "srt", "models").glob("*.py"))
    defining = {module for module in modules if f"class {architecture}(" in module.read_text()}
    if not defining:
        raise UnsupportedModel(f"SGLang has no architecture {architecture}", architecture=architecture)
    return [module.stem for module in modules if module not in defining]


def _cores_of_ranks(tp_size: int, num_threads: int) -> list[str]:
    """Core lists for each rank, "0|1" or "0,1|2,3", as SGLang expects. With too few cores they repeat; replicas share them."""
    cores = sorted(os.sched_getaffinity(0))
    return [",".join(str(cores[(rank * num_threads + i) % len(cores)]) for i in range(num_threads)) for rank in range(tp_size)]


_log = logging.getLogger(__name__)


def main() -> int:
    """Runs the service until SIGTERM or SIGINT. Returns the exit code: 0 after a requested stop."""
    path = config_argument("rollout")
    try:
        config = load_config(path)
        configure_logging("rollout")
        logging.getLogger("sglang").setLevel(logging.WARNING)
        return _serve(config, StartupDeadline(config.coordinator.stage_timeout_s), StartSeconds(os.environ))
    except TasukiError as error:
        sys.stderr.write(f"tasuki.rollout: {error.reason}: {error.message}\n")
        return 1


def _serve(config: NodeConfig, deadline: StartupDeadline, start: StartSeconds) -> int:
    model, temp_dir = read_model(config), paths.engine_dir(config.state_dir)
    with StateLock.take(config.state_dir, name="rollout") as lock, ExitStack() as cleanup:
        shutil.rmtree(temp_dir, ignore_errors=True)  # left by a killed service
        temp_dir.mkdir(mode=0o700)
        # Runs at interpreter exit, after multiprocessing has removed its own files there (at priority -100).
        Finalize(None, shutil.rmtree, args=(temp_dir, True), exitpriority=-200)
        deadline.before_exit.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        deadline.before_exit.callback(cleanup.close)
        kept = cache_variables(config.state_dir, given=os.environ)
        _set_environment({**engine_environment(config, model, temp_dir=temp_dir), **kept})
        show_gpus(config)
        cleanup.callback(Heartbeat(config.state_dir, "rollout").close)  # covers the start; the service has its own
        ranks = RankProcesses()
        cleanup.callback(ranks.kill)
        cleanup.callback(deadline.finish)
        # At the node's start a trainer that serves already has left the engine its room.
        if config.device == "cuda" and paths.FIRST_START_VARIABLE not in os.environ:
            wait_to_leave(Service.TRAINER, paths.node_targets(config)["trainer"])
            start.end("room")
        ranks.start(config, held=[lock])
        from tasuki.rollout.serve import serve

        start.end("imports")
        return serve(config, model, ranks, deadline, start)


def _set_environment(ours: Mapping[str, str]) -> None:
    """Sets the environment of this process and of the engine's processes, which inherit it."""
    dropped = foreign_variables(os.environ)
    for name in dropped:
        del os.environ[name]
    if dropped:
        _log.warning("event=environment_dropped names=%s", ",".join(dropped))
    os.environ.update(ours)


if __name__ == "__main__":
    sys.exit(main())
