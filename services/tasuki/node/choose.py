"""Choices of a node, made by the planner before it starts, and checks that a CPU has memory for its ranks."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from tasuki.config.choices import Choices
from tasuki.config.gpus import smallest_gpu_bytes
from tasuki.config.load import SLOW_BFLOAT16, slow_dtypes
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner import choose as planner
from tasuki.planner.node import gb, node_of
from tasuki.planner.plan import plan
from tasuki.planner.residency import stay_and_leave
from tasuki.planner.rollout_bytes import engine_weights, kv_pool
from tasuki.planner.trainer_bytes import trainer_tags
from tasuki.wire.errors import InvalidArgument

_FIELD = "memory.host_budget_bytes"
# Of a rank on a CPU, beyond what it shares with the process that forked it; measured 100 MiB.
_LEAST_RANK_BYTES = 64 << 20
# Unused on a CPU, but the planner requires a GPU size.
_NO_GPU = 1
_CUDA_SIZES = "import torch; print(min(torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count())))"
_CUDA_TIMEOUT_S = 120.0


def choose(config: NodeConfig, *, resumes: bool, tell: Callable[[str], None]) -> Choices:
    """Plans the node on this machine.

    resumes: the trainer replays the steps of its log at the start, which needs the memory of a step. tell: takes one line for each kind
    of device, and one if the node does not fit into the memory that is free now.

    Raises InvalidArgument if the KV cache has more tokens than fit, or cannot hold one sequence.
    """
    if slow := slow_dtypes(config):
        tell(f'{" and ".join(slow)} = "bfloat16": {SLOW_BFLOAT16}; remove the keys')
    budget, host = config.memory.host_budget_bytes, host_memory()
    gpu_bytes = _NO_GPU if config.device == "cpu" else _gpu_bytes()
    node = planner.choose(
        node_of(config, gpu_bytes=gpu_bytes, host_bytes=host.total_bytes),
        free_host_bytes=host.available_bytes if budget is None else budget,
    )
    for name, stays, leaves in stay_and_leave(node):
        tell(f"{name}: keeps {', '.join(stays) or 'nothing'}; releases {', '.join(leaves) or 'nothing'}")
    planned = plan(replace(node, host_bytes=host.available_bytes))
    if not planned.fits:
        tell(
            f"the plan does not fit: {'; '.join(planned.problems())}; the node starts all the same, and may run out of memory; "
            "`tasuki plan CONFIG` shows what to change"
        )
    choices = planner.choices_of(node, resumes=resumes)
    if choices.shares_base:
        tell("trainer and rollout read one copy of the model below the adapters")
    if choices.merges_in_place:
        tell("adapters are merged in the base's own memory, which leaves at OFFLOAD: a copy does not fit")
    if choices.starts_together and config.device == "cuda":
        tell("trainer and rollout start at the same time: every GPU has room for both")
    return choices


def _gpu_bytes() -> int:
    """Memory of the smallest GPU: NVML's figure, else CUDA's, from a process of its own. Raises InvalidArgument if neither has one."""
    known = smallest_gpu_bytes()
    if known is not None:
        return known
    told = subprocess.run(
        [sys.executable, "-P", "-c", _CUDA_SIZES], capture_output=True, text=True, timeout=_CUDA_TIMEOUT_S, check=False
    )
    if not told.stdout.strip().isdecimal():
        raise InvalidArgument("device", 'is "cuda", but neither NVML nor CUDA reports the memory of the GPUs: fix the driver')
    return int(told.stdout)


def check_host_budget(config: NodeConfig) -> None:
    """Raises InvalidArgument if a rank's share of the budget cannot hold the tags that it creates at start."""
    budget = config.memory.host_budget_bytes
    if budget is None:
        return
    node = planner.choose(node_of(config, gpu_bytes=_NO_GPU, host_bytes=budget))
    of_trainer = {str(part): size for part, size in trainer_tags(node).items()}
    of_engine = {"rollout weights": engine_weights(node), "KV cache": kv_pool(node, taken_bytes=0).num_bytes}
    for name, num_ranks, tags in (
        ("trainer", config.trainer.num_ranks, of_trainer),
        ("rollout", config.num_engine_ranks, of_engine),
    ):
        needed, share = sum(tags.values()), budget // num_ranks
        if needed > share:
            parts = ", ".join(f"{tag} {size}" for tag, size in tags.items())
            raise InvalidArgument(
                _FIELD,
                f"{budget} bytes are {share} for each of the {num_ranks} {name} ranks, and one takes {needed} in whole chunks when it"
                f" starts ({parts}); give at least {needed * num_ranks}",
                needed_bytes=needed * num_ranks,
            )


def check_host_ranks(config: NodeConfig) -> None:
    """Raises InvalidArgument if a CPU's memory cannot even hold the processes of the ranks, which would stop the whole machine."""
    num_ranks = config.trainer.num_ranks + config.num_engine_ranks
    needed, host = num_ranks * _LEAST_RANK_BYTES, host_memory()
    if config.device == "cpu" and needed > host.total_bytes:
        key = "trainer.num_ranks" if config.trainer.num_ranks >= config.num_engine_ranks else "rollout.tp_size"
        text = f"makes {num_ranks} processes of trainer and rollout, which take at least {gb(needed)} GB; {host.describe()}"
        raise InvalidArgument(key, text, needed_bytes=needed)
