"""The node's memory pool, owned by the supervisor: it lives as long as the node, uses none of the pool, and sees processes die."""

from __future__ import annotations

from contextlib import ExitStack

from tasuki.config.places import pool_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.memory.pool import PoolKeeper, PoolUsage, pool_bytes
from tasuki.transport.pool_socket import PoolServer
from tasuki.wire.errors import OutOfGpuMemory


def check_pool_room(config: NodeConfig) -> None:
    """Raises OutOfGpuMemory if the machine lacks the memory for the node's pool."""
    size = config.memory.host_budget_bytes
    if not config.memory.pool or size is None:
        return
    needed, free = pool_bytes(size), host_memory().available_bytes
    if needed > free:
        raise OutOfGpuMemory(
            f"memory.pool needs {needed} bytes at the node's start, but this machine has {free} free; lower memory.host_budget_bytes,"
            " or remove memory.pool",
            tag="pool",
            needed_bytes=needed,
            free_bytes=free,
            device="cpu",
        )


class NodePool:
    """The pool's chunks and socket, if the configuration has a pool; otherwise does nothing."""

    def __init__(self, config: NodeConfig) -> None:
        """Raises OutOfGpuMemory if the machine lacks the memory."""
        self._server: PoolServer | None = None
        self._keeper: PoolKeeper | None = None
        self._cleanup = ExitStack()
        size = config.memory.host_budget_bytes
        if config.memory.pool and size is not None:
            self._keeper = PoolKeeper(size, device=config.device)
            self._cleanup.callback(self._keeper.close)
            self._server = PoolServer(self._keeper, pool_socket_path(config.state_dir))
            self._cleanup.callback(self._server.close)

    def poll(self) -> None:
        """Accepts processes that join, and reclaims chunks of dead ones."""
        if self._server is not None:
            self._server.poll()

    def usage(self) -> PoolUsage | None:
        return None if self._keeper is None else self._keeper.usage()

    def close(self) -> None:
        """Idempotent."""
        self._cleanup.close()
