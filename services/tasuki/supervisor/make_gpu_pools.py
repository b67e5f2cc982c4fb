"""Makes the memory pools of a node's GPUs, sends them to the supervisor and ends:

python -m tasuki.supervisor.make_gpu_pools --config node.toml --fd N

The descriptors keep the memory. The supervisor makes no CUDA context, which would take memory of every GPU for as long as the node runs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasuki.config.gpus import gpu_processes, gpus_of, show_gpus
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.memory.pool import GPU_CHUNK_BYTES, PoolKeeper, device_room
from tasuki.memory.stages import Phase
from tasuki.planner.layout import Part
from tasuki.planner.node_plan import plan_node
from tasuki.planner.plan import Plan
from tasuki.transport.fd_socket import send_all
from tasuki.wire.errors import OutOfGpuMemory, TasukiError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tasuki.supervisor.make_gpu_pools")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="a connected unix socket")
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config)
    show_gpus(config)
    with socket.socket(fileno=arguments.fd) as peer:
        try:
            for gpu in used_gpus(config):
                keeper = _make(config, gpu)
                send_all(peer, b"", keeper.fds)
                keeper.close()
        except TasukiError as error:
            send_all(peer, json.dumps([error.reason, error.message, dict(error.metadata)]).encode(), [])
            return 1
    return 0


def used_gpus(config: NodeConfig) -> list[int]:
    """GPUs of either service, as all processes of the node number them."""
    gpus = gpus_of(config)
    return sorted({*gpus.trainer, *gpus.rollout})


def _make(config: NodeConfig, gpu: int) -> PoolKeeper:
    """Raises as `gpu_pool_bytes`."""
    device = f"cuda:{gpu}"
    free, total = device_room(device)
    plan = plan_node(config, gpu_bytes=total, host_bytes=host_memory().total_bytes)
    return PoolKeeper(gpu_pool_bytes(plan, gpu, free_bytes=free, read_processes=gpu_processes), device=device)


def gpu_pool_bytes(plan: Plan, gpu: int, *, free_bytes: int, read_processes: Callable[[int], Mapping[int, int]]) -> int:
    """All memory of a GPU but what the driver and NCCL take for each process.

    read_processes: bytes on a GPU by pid. Raises OutOfGpuMemory, with the processes that hold the GPU, if the pool would be smaller than
    the plan's peak, which residency and KV tokens rely on, or than the pool of an empty GPU if that is smaller.
    """
    layout = plan.layout
    outside = plan.stage(Phase.TRAIN).gpus[gpu].get(Part.CONTEXTS, 0) + layout.overheads.margin
    peak = max(sum(stage.gpus[gpu].values()) - stage.gpus[gpu].get(Part.CONTEXTS, 0) for stage in plan.stages)
    # This process's own context is among what is not free, and ends with it.
    most = layout.gpu_bytes - outside - layout.overheads.trainer_context
    size = (free_bytes - outside) // GPU_CHUNK_BYTES * GPU_CHUNK_BYTES
    needed = outside + max(GPU_CHUNK_BYTES, min(peak, most))
    if free_bytes < needed:
        device, holders = f"cuda:{gpu}", read_processes(gpu)
        held = [f"pid {pid} ({num_bytes} bytes)" for pid, num_bytes in holders.items() if pid != os.getpid()]
        raise OutOfGpuMemory(
            f"{device} has {free_bytes} bytes free, and a node with memory.pool needs {needed} at its start, as planned; its memory is held"
            f" by {', '.join(held) or 'processes that are not visible from here: run nvidia-smi on the host'}; end them, or use other GPUs",
            tag="pool",
            needed_bytes=needed,
            free_bytes=free_bytes,
            device=device,
        )
    return size


if __name__ == "__main__":
    sys.exit(main())
