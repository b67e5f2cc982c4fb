"""Work that outlives its callers: each of them reads its events from the first one on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

from tasuki.coordinator.records import ChangeoverRecord, NodeState, StageEvent
from tasuki.wire.errors import TasukiError, from_reason


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """An event, and the node's state after it."""

    event: StageEvent
    state: NodeState


class Operation:
    """One piece of work and what it told. `subject` is what was asked for, so that a request id used twice is noticed."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._updates: list[StateUpdate] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._end)

    def tell(self, update: StateUpdate) -> None:
        self._updates.append(update)
        self._wake()

    async def follow(self) -> AsyncIterator[StateUpdate]:
        """Every event from the first, until the work ends; then the work's error, if it had one."""
        assert self._task is not None
        position = 0
        while True:
            news, is_over = self._news, self._task.done()
            while position < len(self._updates):
                yield self._updates[position]
                position += 1
            if is_over:
                break
            await news.wait()
        self._task.result()

    async def stop(self) -> None:
        """Ends the work where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def reason(self) -> str:
        """Of the error that it ended with; empty when it runs, or ended well."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return ""
        error = self._task.exception()
        return error.reason if isinstance(error, TasukiError) else ""

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # read here, so that asyncio does not report an error that every follower has left
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def replayed(changeover: ChangeoverRecord, state: NodeState) -> Operation:
    """A changeover that ended in an earlier life of the coordinator, as an operation that ended."""
    operation = Operation(f"phase {changeover.target}")
    for event in (*changeover.events, changeover.ending()):
        operation.tell(StateUpdate(event, state))
    operation.start(_ended(changeover))
    return operation


async def _ended(changeover: ChangeoverRecord) -> None:
    if changeover.error_reason:
        raise from_reason(changeover.error_reason, changeover.error_message, {"changeover_id": changeover.changeover_id})
