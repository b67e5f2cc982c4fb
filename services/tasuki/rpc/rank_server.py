"""A rank's side: takes commands from the front, one after the other, and answers each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
from google.protobuf.message import Message

from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.rank_front import CommandT, ResultT, rank_identity
from tasuki.v1.ranks_pb2 import RankError
from tasuki.wire.errors import TasukiError

_log = logging.getLogger("tasuki.rpc")

Handlers = Mapping[str, Callable[[Any], Message]]
"""Field of the command -> what takes its message and gives the one for the same field of the result."""


class RankServer:
    """A rank's socket, of the thread that uses it."""

    def __init__(self, address: str, *, rank: int | None = None, linger_ms: int = 1000) -> None:
        """rank: None for a socket that only sends. linger_ms: how long the last result may take to leave after `close`."""
        self._context, self._linger_ms = zmq.Context(), linger_ms
        self._socket = self._context.socket(zmq.DEALER)
        if rank is not None:
            self._socket.setsockopt(zmq.IDENTITY, rank_identity(rank))
        self._socket.connect(address)

    def front_gone(self) -> zmq.Socket[bytes]:
        """A socket that is readable once the front has closed its end."""
        return self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, result: Message) -> None:
        self._socket.send(result.SerializeToString())

    def serve(self, answer: Callable[[bytes], Message | None], *, until: Sequence[Any]) -> Any:
        """Answers commands. Returns the one of `until`, sockets and descriptors, that is readable; None when `answer` gives None."""
        poller = zmq.Poller()
        for readable in (self._socket, *until):
            poller.register(readable, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket not in ready:
                return next(readable for readable in until if readable in ready)
            result = answer(self._socket.recv())
            if result is None:
                return None
            self.send(result)

    def close(self) -> None:
        self._context.destroy(linger=self._linger_ms)


def answer_command(command: CommandT, result: ResultT, *, handlers: Handlers, failpoints: Failpoints) -> ResultT:
    """Runs what `handlers` has for the command and puts its answer, or its error, into `result`.

    failpoints: the command comes to one with its own name before it is carried out, and ".done" after.
    """
    name = command.WhichOneof("command")
    try:
        assert name is not None, "the front always sets a command"
        failpoints.hit(name)
        getattr(result, name).CopyFrom(handlers[name](getattr(command, name)))
        failpoints.hit(f"{name}.done")
    except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
        result.error.CopyFrom(rank_error(error))
    return result


def rank_error(error: Exception) -> RankError:
    """As the front hears of it: an error of ours keeps its reason, any other is logged and has none."""
    if isinstance(error, TasukiError):
        return RankError(reason=error.reason, message=error.message, metadata=error.metadata)
    _log.error("event=rank_failed", exc_info=error)
    return RankError(message=f"{type(error).__name__}: {error}")
