"""Fencing, order and exactly-once answers of mutating commands: one gate for each service."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc

from tasuki.v1.types_pb2 import CommandId
from tasuki.wire.errors import InvalidArgument, StaleEpoch, StaleSequence, TasukiError

_Answer = TypeVar("_Answer")
_KEPT_ANSWERS = 1024
_MAX_REQUEST_ID = 128
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""Codes of the errors after which nothing has changed."""


class CommandGate:
    """Runs commands one at a time, each once: a repeated request_id gets the first answer, or the first error.

    A command outlives its caller: a cancelled or timed-out call leaves it running, and the same request_id finds it again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.sequence = 0
        self._answers: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def stage(self, command: CommandId, action: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Runs a stage command of the coordinator.

        Raises StaleEpoch below the highest epoch seen, StaleSequence when the sequence number does not grow, InvalidArgument without
        a request_id. A refused command leaves no trace: one out of order, with whatever numbers, cannot shut the coordinator out.
        """
        before = after = (self.epoch, self.sequence)

        def fence() -> None:
            nonlocal before, after
            before = (self.epoch, self.sequence)
            self._refuse_old(command.epoch)
            if command.epoch > self.epoch:
                self.epoch, self.sequence = command.epoch, 0
            if command.sequence <= self.sequence:
                raise StaleSequence(
                    f"stage command {command.sequence} comes after {self.sequence}",
                    sequence=command.sequence,
                    current_sequence=self.sequence,
                )
            self.sequence = command.sequence
            after = (self.epoch, self.sequence)

        async def act() -> _Answer:
            try:
                return await action()
            except TasukiError as error:
                if error.code in _REFUSALS and (self.epoch, self.sequence) == after:
                    self.epoch, self.sequence = before
                raise

        return await self._run(command, fence, act)

    async def once(self, command: CommandId, action: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Runs a command that is no stage. Epoch 0 means that the caller does not ask to be fenced."""

        def fence() -> None:
            if command.epoch:
                self._refuse_old(command.epoch)

        return await self._run(command, fence, action)

    async def idle(self) -> None:
        """Returns when no command runs."""
        async with self._lock:
            return

    def _refuse_old(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} is over: this service has seen {self.epoch}; read the coordinator's state again",
                epoch=epoch,
                current_epoch=self.epoch,
            )

    async def _run(self, command: CommandId, fence: Callable[[], None], action: Callable[[], Awaitable[_Answer]]) -> _Answer:
        request_id = command.request_id
        if not 0 < len(request_id) <= _MAX_REQUEST_ID:
            raise InvalidArgument(
                "command.request_id", f"give one of 1 to {_MAX_REQUEST_ID} characters, unique for each intent"
            )
        task = self._answers.get(request_id)
        if task is None:
            fence()
            task = asyncio.get_running_loop().create_task(self._one_at_a_time(action))
            self._answers[request_id] = task
            self._forget_old()
        return cast(_Answer, await asyncio.shield(task))

    async def _one_at_a_time(self, action: Callable[[], Awaitable[_Answer]]) -> _Answer:
        async with self._lock:
            return await action()

    def _forget_old(self) -> None:
        for request_id in list(self._answers)[: max(0, len(self._answers) - _KEPT_ANSWERS)]:
            if self._answers[request_id].done():
                # Nobody may have waited for it; reading the error keeps asyncio from reporting it as lost.
                self._answers.pop(request_id).exception()
