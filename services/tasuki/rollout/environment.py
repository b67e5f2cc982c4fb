"""Environment variables that SGLang reads when it is imported; `__main__` sets them before that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal


def engine_environment(*, device: Literal["cpu", "cuda"], tp_size: int, num_threads: int, temp_dir: Path) -> dict[str, str]:
    """What the engine's processes, which inherit it, need on `device`.

    num_threads: torch threads of one rank on a CPU. temp_dir: private folder for the sockets and files that SGLang makes.
    """
    everywhere = {
        "TMPDIR": str(temp_dir),
        # Everything is on this machine; a look-up would only wait for a network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The check compares free memory that other services of the node hold; admission is the coordinator's.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # SGLang keeps a few positions of its context for itself, see arguments.py.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cuda":
        return everywhere
    return everywhere | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(_cores_of_ranks(tp_size, num_threads)),
        "OMP_NUM_THREADS": str(num_threads),
        # The CUDA build of torch brings an NCCL that needs a driver; ranks on a CPU talk over gloo.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
    }


def _cores_of_ranks(tp_size: int, num_threads: int) -> list[str]:
    """SGLang wants a list of cores for each rank, "0|1" or "0,1|2,3"; on fewer cores they repeat."""
    cores = sorted(os.sched_getaffinity(0))
    return [",".join(str(cores[(rank * num_threads + i) % len(cores)]) for i in range(num_threads)) for rank in range(tp_size)]
