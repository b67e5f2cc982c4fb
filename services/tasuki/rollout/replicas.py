"""Replicas of the engine behind one SGLang front, which does not know of them: distributes requests and broadcasts messages."""

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
"""Start arguments of one replica's ranks."""


def launches_of(server_args: ServerArgs, port_args: PortArgs, *, num_replicas: int) -> list[Launch]:
    """The first replica uses SGLang's own sockets; the others have their own sockets and seed, and answer to the same front."""
    launches = [(copy(server_args), port_args)]
    for replica in range(1, num_replicas):
        same = {name: getattr(port_args, name) for name in ("tokenizer_ipc_name", "detokenizer_ipc_name", "instance_id")}
        arguments = copy(server_args)
        # Otherwise replicas would draw the same samples of a prompt.
        arguments.random_seed = (server_args.random_seed or 0) + replica
        launches.append((arguments, replace(PortArgs.init_new(server_args), **same)))
    if num_replicas > 1:
        for replica, (arguments, _) in enumerate(launches):
            # SGLang's own label of a replica. Without it the metrics of all would be taken for one's.
            arguments.extra_metric_labels = {"dp_rank": str(replica)}
    return launches


def shares(num_running: Sequence[int], num_requests: int) -> list[range]:
    """Splits requests over replicas so that all end up with equally many; replicas that already have more get none.

    num_running: of each replica. Shares are contiguous, so that samples of one prompt stay together and share its KV cache.
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
    """Replaces the socket on which SGLang's front sends to its engine: messages go to every replica, except within `only`."""

    def __init__(self, manager: Any, ports: Sequence[PortArgs]) -> None:
        """manager: SGLang's TokenizerManager. ports: of every replica; the front has created the first one's socket."""
        first = manager.send_to_scheduler
        others = [get_zmq_socket(first.context, zmq.PUSH, one.scheduler_input_ipc_name, True) for one in ports[1:]]
        self._every = self._addressed = [first, *others]
        manager.send_to_scheduler = self
        # The only kind of message that every replica answers.
        manager.update_weights_from_tensor_communicator._fan_out = len(ports)

    def send_pyobj(self, message: Any, **settings: Any) -> None:
        """Called by SGLang."""
        for socket in self._addressed:
            socket.send_pyobj(message, **settings)

    @contextmanager
    def only(self, replica: int) -> Iterator[None]:
        """Must not be held across a suspension."""
        self._addressed = [self._every[replica]]
        try:
            yield
        finally:
            self._addressed = self._every
