"""Makes the memory pools of a node's GPUs, sends them to the supervisor and ends:

python -m tasuki.supervisor.make_gpu_pools --config node.toml --fd N

The descriptors keep the memory. The supervisor makes no CUDA context, which would take memory of every GPU for as long as the node runs.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tasuki.config.gpus import gpus_of, show_gpus
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.memory.pool import GPU_CHUNK_BYTES, PoolKeeper, device_room
from tasuki.memory.stages import Phase
from tasuki.planner.layout import Part
from tasuki.planner.node_plan import plan_node
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
            send_all(peer, f"{error.reason}\n{error.message}".encode(), [])
            return 1
    return 0


def used_gpus(config: NodeConfig) -> list[int]:
    """Of either service, as all processes of the node number them."""
    gpus = gpus_of(config)
    return sorted({*gpus.trainer, *gpus.rollout})


def _make(config: NodeConfig, gpu: int) -> PoolKeeper:
    """All memory of a GPU but what the driver and NCCL take for each process. Raises OutOfGpuMemory if nothing would be left."""
    device = f"cuda:{gpu}"
    free, total = device_room(device)
    plan = plan_node(config, gpu_bytes=total, host_bytes=host_memory().total_bytes)
    outside = plan.stage(Phase.TRAIN).gpus[gpu].get(Part.CONTEXTS, 0) + plan.layout.overheads.margin
    size = (free - outside) // GPU_CHUNK_BYTES * GPU_CHUNK_BYTES
    if size <= 0:
        raise OutOfGpuMemory(
            f"{device} has {free} bytes free, of which the node's processes need {outside} beside memory.pool; free the GPU",
            tag="pool",
            needed_bytes=outside + GPU_CHUNK_BYTES,
            free_bytes=free,
            device=device,
        )
    return PoolKeeper(size, device=device)


if __name__ == "__main__":
    sys.exit(main())
