"""A service's place in its node's memory pool."""

from __future__ import annotations

import torch

from tasuki.config.places import pool_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.transport.pool_socket import join_pool


def join_node_pool(config: NodeConfig, *, device: torch.device, timeout_s: float) -> None:
    """Takes this process's memory of `device` from the node's pool: its arenas' and, on a GPU, torch's own.

    Call it before the first arena. Raises BadHandle if the pool does not answer in time; the errors of take_segments_from_pool.
    """
    join_pool(pool_socket_path(config.state_dir, device.index or 0), device=str(device), timeout_s=timeout_s)
    if device.type == "cuda":
        from tasuki.memory.torch_segments import take_segments_from_pool

        take_segments_from_pool(str(device))
