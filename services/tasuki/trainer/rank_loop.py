"""A rank's side: takes commands from the front, one after the other, and leaves when the front does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import zmq
from google.protobuf.message import Message

from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.trainer.ranks import rank_identity
from tasuki.v1.ranks_pb2 import RankError, RankReady, TrainerRankCommand, TrainerRankResult
from tasuki.wire.errors import TasukiError

_log = logging.getLogger("tasuki.trainer")

# How long the last answer may take to leave.
_LINGER_MS = 1000

Handlers = dict[str, Callable[..., Message]]
"""Field of TrainerRankCommand -> what takes its message and gives the one for the same field of TrainerRankResult."""


class RankLoop:
    """Serves the front until it stops, or is gone."""

    def __init__(self, *, rank: int, address: str, launcher_fd: int, heartbeat: Heartbeat, failpoints: Failpoints) -> None:
        """launcher_fd: pidfd of the process that launched the ranks; its end ends the loop. heartbeat: shows when a command runs."""
        self._rank = rank
        self._heartbeat, self._failpoints = heartbeat, failpoints
        self._launcher_fd = launcher_fd
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, rank_identity(rank))
        self._front_gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def run(self, start: Callable[[], tuple[RankReady, Handlers]]) -> bool:
        """Starts the rank's work, then answers commands. Returns False when the start failed; the front knows why."""
        try:
            try:
                ready, handlers = start()
            except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
                self._send(TrainerRankResult(call=0, rank=self._rank, error=_rank_error(error)))
                return False
            ready.pid = os.getpid()
            self._send(TrainerRankResult(call=0, rank=self._rank, ready=ready))
            while (command := self._next_command()) is not None:
                self._send(self._answer(command, handlers))
            return True
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _next_command(self) -> TrainerRankCommand | None:
        """Waits for a command; None when there will be no more."""
        poller = zmq.Poller()
        for readable in (self._socket, self._front_gone, self._launcher_fd):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._socket in ready:
            command = TrainerRankCommand.FromString(self._socket.recv())
            return None if command.HasField("stop") else command
        _log.warning(
            "event=rank_leaves rank=%d cause=%s", self._rank, "front_gone" if self._front_gone in ready else "launcher_gone"
        )
        return None

    def _answer(self, command: TrainerRankCommand, handlers: Handlers) -> TrainerRankResult:
        name = command.WhichOneof("command")
        assert name is not None, "the front always sets a command"
        result = TrainerRankResult(call=command.call, rank=self._rank)
        try:
            with self._heartbeat.working():
                self._failpoints.hit(name)
                getattr(result, name).CopyFrom(handlers[name](getattr(command, name)))
                self._failpoints.hit(f"{name}.done")
        except Exception as error:  # noqa: BLE001 - as above
            result.error.CopyFrom(_rank_error(error))
        return result

    def _send(self, result: TrainerRankResult) -> None:
        self._socket.send(result.SerializeToString())


def _rank_error(error: Exception) -> RankError:
    if isinstance(error, TasukiError):
        return RankError(reason=error.reason, message=error.message, metadata=error.metadata)
    _log.error("event=rank_error", exc_info=error)
    return RankError(message=f"{type(error).__name__}: {error}")
