"""Replicas of the engine behind one front, which SGLang's own knows nothing of: who gets which requests, and how messages reach all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import zmq
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_zmq_socket

Launch = tuple[ServerArgs, PortArgs]
"""What the ranks of one replica start with."""


def launches_of(server_args: ServerArgs, port_args: PortArgs, *, num_replicas: int) -> list[Launch]:
    """The first replica's are SGLang's own; the others have their own sockets and seed, and answer to the same front."""
    launches = [(server_args, port_args)]
    for replica in range(1, num_replicas):
        same = {name: getattr(port_args, name) for name in ("tokenizer_ipc_name", "detokenizer_ipc_name", "instance_id")}
        arguments = copy(server_args)
        # Else replicas would draw the same samples of the same prompt.
        arguments.random_seed = (server_args.random_seed or 0) + replica
        launches.append((arguments, replace(PortArgs.init_new(server_args), **same)))
    return launches


def shares(num_running: Sequence[int], num_requests: int) -> list[range]:
    """Which requests go to each replica, so that all have equally many then, or those that have more already get none.

    num_running: of each replica. Shares are runs of neighbours, since the samples of one prompt stand together and share its KV cache.
    """
    idlest = sorted(range(len(num_running)), key=lambda replica: num_running[replica])
    while len(idlest) * num_running[idlest[-1]] > num_requests + sum(num_running[replica] for replica in idlest):
        idlest.pop()
    level, over = divmod(num_requests + sum(num_running[replica] for replica in idlest), len(idlest))
    counts = [0] * len(num_running)
    for place, replica in enumerate(idlest):
        counts[replica] = level + (place < over) - num_running[replica]
    ends = [sum(counts[: replica + 1]) for replica in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


class ReplicaSockets:
    """In the place of the socket on which SGLang's front sends to its engine: what is sent goes to every replica, but within `only`."""

    def __init__(self, manager: Any, ports: Sequence[PortArgs]) -> None:
        """manager: SGLang's TokenizerManager. ports: of every replica; the front has made the first one's socket."""
        first = manager.send_to_scheduler
        others = [get_zmq_socket(first.context, zmq.PUSH, one.scheduler_input_ipc_name, True) for one in ports[1:]]
        self._every = self._addressed = [first, *others]
        manager.send_to_scheduler = self
        # The one kind of message to which every replica answers.
        manager.update_weights_from_tensor_communicator._fan_out = len(ports)

    def send_pyobj(self, message: Any, **settings: Any) -> None:
        """What SGLang calls."""
        for socket in self._addressed:
            socket.send_pyobj(message, **settings)

    @contextmanager
    def only(self, replica: int) -> Iterator[None]:
        """Must not be held over a suspension."""
        self._addressed = [self._every[replica]]
        try:
            yield
        finally:
            self._addressed = self._every
