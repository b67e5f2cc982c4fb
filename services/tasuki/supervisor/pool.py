"""The node's memory pools, owned by the supervisor: they live as long as the node, it uses none of them, and it sees processes die."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from tasuki.config.places import config_path, pool_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.memory.library import check_preloadable
from tasuki.memory.pool import PoolKeeper, pool_bytes
from tasuki.supervisor.make_gpu_pools import used_gpus
from tasuki.transport.fd_socket import MAX_ALL_FDS, allow_descriptors, receive_all
from tasuki.transport.pool_socket import PoolServer
from tasuki.wire.errors import BadHandle, InternalError, OutOfGpuMemory, from_reason

_MAKE_S = 120.0


def check_pool_room(config: NodeConfig) -> None:
    """Raises OutOfGpuMemory if the machine lacks the memory for the node's pool on a CPU."""
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
    """The chunks and sockets of the node's pools, one for each device, if the configuration has any; otherwise does nothing."""

    def __init__(self, config: NodeConfig) -> None:
        """Raises OutOfGpuMemory if a device lacks the memory, InternalError if a GPU's pool cannot be made."""
        self._servers: list[PoolServer] = []
        self._cleanup = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._cleanup.close)
            for gpu, keeper in _keepers(config):
                self._cleanup.callback(keeper.close)
                server = PoolServer(keeper, pool_socket_path(config.state_dir, gpu))
                self._servers.append(server)
                self._cleanup.callback(server.close)
            undo.pop_all()

    def poll(self) -> None:
        """Accepts processes that join, and reclaims chunks of dead ones."""
        for server in self._servers:
            server.poll()

    def close(self) -> None:
        """Idempotent."""
        self._cleanup.close()


def _keepers(config: NodeConfig) -> Iterator[tuple[int, PoolKeeper]]:
    """Pool of each GPU; a CPU is number 0."""
    size = config.memory.host_budget_bytes
    if not config.memory.pool:
        return
    if config.device == "cpu":
        assert size is not None
        yield 0, PoolKeeper(size, device="cpu")
    else:
        yield from _gpu_keepers(config)


def _gpu_keepers(config: NodeConfig) -> Iterator[tuple[int, PoolKeeper]]:
    """Pools that a short-lived process makes."""
    check_preloadable()
    gpus = used_gpus(config)
    allow_descriptors(len(gpus) * MAX_ALL_FDS)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    path = config_path(config.state_dir)
    arguments = ["--config", str(path), "--fd", str(there.fileno())]
    command = [sys.executable, "-P", "-m", "tasuki.supervisor.make_gpu_pools", *arguments]
    with here, subprocess.Popen(command, pass_fds=(there.fileno(),)) as maker:
        there.close()
        try:
            for gpu in gpus:
                yield gpu, PoolKeeper.of(_received(here, gpu), device=f"cuda:{gpu}")
        finally:
            maker.kill()


def _received(peer: socket.socket, gpu: int) -> list[int]:
    """Raises OutOfGpuMemory or InternalError with what the maker says, and InternalError if it has ended or hangs."""
    try:
        message, fds = receive_all(peer, name=f"the pool of GPU {gpu}", timeout_s=_MAKE_S)
    except (OSError, BadHandle) as error:
        raise InternalError(f"the pool of GPU {gpu} could not be made: {error}; the supervisor's log has the cause") from error
    if not message:
        return fds
    reason, text, metadata = json.loads(message)
    if reason == OutOfGpuMemory.reason:
        raise from_reason(reason, text, metadata)
    raise InternalError(f"the pool of GPU {gpu} could not be made: {text}")
