"""The operations of a coordinator: one at a time, each found again by its request id, also in an earlier life's journal."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from tasuki.coordinator.attempts import last_attempt
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.operation import Operation, StateUpdate, replayed
from tasuki.coordinator.records import NodeState, StageEvent
from tasuki.coordinator.watchers import Watchers
from tasuki.wire.errors import (
    ChangeoverRunning,
    DeadlineExceeded,
    DiskFull,
    EnginePoisoned,
    InternalError,
    Interrupted,
    InvalidArgument,
    NotJoined,
    PeerUnavailable,
    WeightsCorrupt,
)

LOSSES = (DeadlineExceeded, EnginePoisoned, InternalError, PeerUnavailable, WeightsCorrupt)
"""After these a service is gone, or has to go. The changeover is closed as failed and another one begun when all services are there
again; an error that changed nothing, such as a lack of memory, is the caller's."""
_UNANSWERED = {error.reason for error in (*LOSSES, Interrupted)}
_TO_REPEAT = (DiskFull.reason, NotJoined.reason)
"""Nothing was carried out: a request that comes again by the same id is tried again."""
_KEPT = 256


class Operations:
    """Runs one operation at a time. `turn` is held by what runs."""

    def __init__(self, journal: Journal, *, state: Callable[[], NodeState]) -> None:
        self._journal, self._state = journal, state
        self._running: Operation | None = None
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self.turn = asyncio.Lock()
        self.watchers = Watchers()

    def __len__(self) -> int:
        return len(self._known)

    def join(self, subject: str, request_id: str) -> None:
        """Has a request mean the operation under way, if that is the same and the request is a new one."""
        if self._running is not None and self._running.subject == subject and request_id not in self._known:
            self._remember(request_id, self._running)

    def start(self, subject: str, request_id: str, work: Callable[[], Awaitable[None]]) -> Operation:
        """The operation that this request id began, or a new one that does `work`. Raises ChangeoverRunning when another is under way."""
        known = self._known.get(request_id)
        if known is not None and known.subject == subject and known.reason in _TO_REPEAT:
            known = None
        written = None if known is not None else last_attempt(self._journal, request_id)
        # One that an earlier coordinator left in the middle is not answered by its interruption: it is carried out now.
        if written is not None and written.error_reason not in (*_UNANSWERED, *_TO_REPEAT):
            known = replayed(written, self._state())
        if known is not None:
            if known.subject != subject:
                raise InvalidArgument("request_id", f"{request_id!r} was used for {known.subject} before; choose another one")
            return known
        if self._running is not None:
            raise ChangeoverRunning(
                f"{self._running.subject} is under way; ask for {subject} when it has ended",
                changeover_id=self._state().changeover_id,
            )

        async def alone() -> None:
            try:
                async with self.turn:
                    await work()
            finally:
                self._running = None

        self._running = Operation(subject)
        self._running.start(alone())
        return self._remember(request_id, self._running)

    def tell(self, event: StageEvent) -> None:
        """Passes an event on to the running operation and to the watchers, with the state after it."""
        update = StateUpdate(event, self._state())
        if self._running is not None:
            self._running.tell(update)
        self.watchers.tell(update)

    async def stop(self) -> None:
        """Cuts the running operation off where it is."""
        if self._running is not None:
            await self._running.stop()

    def _remember(self, request_id: str, operation: Operation) -> Operation:
        self._known[request_id] = operation
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return operation
