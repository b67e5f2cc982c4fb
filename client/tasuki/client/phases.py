"""Phases for the client's verbs: acquired before a verb, started ahead of it, and reacquired if another client took the GPUs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tasuki.client import encode
from tasuki.client.connection import Connection
from tasuki.client.types import Phase, StageEvent
from tasuki.v1 import coordinator_pb2, types_pb2
from tasuki.wire.errors import WrongPhase

_Answer = TypeVar("_Answer")


class Phases:
    """One client's view of its node's phase."""

    def __init__(self, connect: Callable[[], Connection], *, timeout_s: float) -> None:
        """connect: returns the client's connection, opening it if needed. timeout_s: of a changeover and of a command in phase TRAIN."""
        self._connect, self._timeout_s = connect, timeout_s
        self._begun: tuple[Phase, asyncio.Task[list[StageEvent]]] | None = None

    async def begin(self, phase: Phase) -> None:
        """Starts what `acquire` does, unless begun before, and returns at once. Raises InvalidArgument for anything but a phase."""
        encode.enum_to_proto(Phase, phase)
        if self._begun is not None and self._begun[0] is phase:
            return
        await self._end_begun()
        self._begun = phase, asyncio.create_task(self._acquire(phase))

    async def acquire(self, phase: Phase) -> list[StageEvent]:
        """Brings the node to a phase. Returns the events, including those of a `begin`. Raises InvalidArgument as `begin`."""
        encode.enum_to_proto(Phase, phase)
        begun = await self._end_begun()
        return begun[1] if begun is not None and begun[0] is phase else await self._acquire(phase)

    async def hold(self, phase: Phase) -> None:
        """Acquires a phase unless the node is already known to be in it."""
        await self._end_begun()
        connection = self._connect()
        if connection.phase is None:
            await connection.refresh()
        if connection.phase is not phase:
            await self.acquire(phase)

    async def train(
        self, give: Callable[[types_pb2.CommandId, float], Awaitable[_Answer]], *, request_id: str | None = None
    ) -> _Answer:
        """Runs a command in phase TRAIN; retries once if another client changed the phase."""
        await self.hold(Phase.TRAIN)
        try:
            return await self._connect().command(give, timeout_s=self._timeout_s, request_id=request_id)
        except WrongPhase:
            await self.acquire(Phase.TRAIN)
            return await self._connect().command(give, timeout_s=self._timeout_s, request_id=request_id)

    async def close(self) -> None:
        """Cancels a changeover started by `begin`."""
        if self._begun is not None:
            (_, task), self._begun = self._begun, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _end_begun(self) -> tuple[Phase, list[StageEvent]] | None:
        """Waits for `begin`. Returns the phase it asked for and its events; None if nothing was begun."""
        if self._begun is None:
            return None
        (phase, task), self._begun = self._begun, None
        return phase, await task

    async def _acquire(self, phase: Phase) -> list[StageEvent]:
        connection = self._connect()

        async def give(command: types_pb2.CommandId, timeout_s: float) -> list[StageEvent]:
            request = coordinator_pb2.AcquireRequest(phase=encode.enum_to_proto(Phase, phase), request_id=command.request_id)
            events: list[StageEvent] = []
            async for response in connection.coordinator.Acquire(request, timeout=timeout_s):
                connection.take(response.state)
                events.append(response.event)
            return events

        connection.phase = None
        events = await connection.command(give, timeout_s=self._timeout_s)
        connection.phase = phase
        return events
