"""Operations of a coordinator: one at a time, each found by its request id, also in the journal of an earlier life.

An operation outlives its callers; each caller reads its events from the first.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tasuki.coordinator.journal import Journal, ending, timestamp
from tasuki.coordinator.phases import phase_of
from tasuki.v1 import coordinator_pb2 as pb
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
    TasukiError,
    WeightsCorrupt,
    from_reason,
)
from tasuki.wire.stages import NEXT, Phase, Stage, StageStatus

LOSSES = (DeadlineExceeded, EnginePoisoned, InternalError, PeerUnavailable, WeightsCorrupt)
"""After these a service is gone, or has to go. The changeover is closed as failed and another one begun when all services are there
again; an error that changed nothing, such as a lack of memory, is the caller's."""
_UNANSWERED = {error.reason for error in (*LOSSES, Interrupted)}
_TO_REPEAT = (DiskFull.reason, NotJoined.reason)
"""Reasons for which nothing was carried out: a repeated request id is tried again."""
_KEPT = 256
_BACKLOG = 1024


Update = pb.AcquireResponse
"""An event, and the node's state after it."""


class Operation:
    """One piece of work and its events. `subject` is the request, so a request id reused for another one is noticed."""

    def __init__(self, subject: str, work: Coroutine[Any, Any, None]) -> None:
        self.subject = subject
        self._updates: list[Update] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._end)

    def tell(self, update: Update) -> None:
        self._updates.append(update)
        self._wake()

    async def follow(self) -> AsyncIterator[Update]:
        """Yields every event from the first until the work ends, then raises the work's error, if any."""
        position = 0
        while True:
            news, is_over = self._news, self.is_over
            while position < len(self._updates):
                yield self._updates[position]
                position += 1
            if is_over:
                break
            await news.wait()
        self._task.result()

    async def stop(self) -> None:
        """Cancels the work at its current point."""
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def is_over(self) -> bool:
        return self._task.done()

    @property
    def reason(self) -> str:
        """Reason of the error that ended it; empty while it runs or if it succeeded."""
        error = self._task.exception() if self.is_over and not self._task.cancelled() else None
        return error.reason if isinstance(error, TasukiError) else ""

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # read here, so asyncio does not report an error with no follower left
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Watchers:
    """Watchers of a node, each with its own queue."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Update | None]] = set()

    @contextmanager
    def watching(self) -> Iterator[asyncio.Queue[Update | None]]:
        """Queue of events from now on, then None. A queue that is not read loses its oldest events."""
        queue: asyncio.Queue[Update | None] = asyncio.Queue(_BACKLOG)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def tell(self, update: Update | None) -> None:
        """Sends an update to every watcher; None ends them all, so that a server can stop."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(update)


class Operations:
    """Operations of a node or a fleet. One runs at a time."""

    def __init__(self, journal: Journal, *, state: Callable[[], pb.NodeState]) -> None:
        self._journal, self._state = journal, state
        self._last: Operation | None = None
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self.watchers = Watchers()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def _running(self) -> Operation | None:
        return None if self._last is None or self._last.is_over else self._last

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Lock held by one task at a time; the task may enter it again."""
        if self._holder is asyncio.current_task():
            yield
            return
        async with self._lock:
            self._holder = asyncio.current_task()
            try:
                yield
            finally:
                self._holder = None

    def join(self, subject: str, request_id: str) -> None:
        """Attaches a new request id to the running operation, if both ask for the same."""
        if self._running is not None and self._running.subject == subject and request_id not in self._known:
            self._remember(request_id, self._running)

    def begin(self, subject: str, request_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Operation:
        """Operation that this request id began, to be followed; a new one that does `work`, in its turn, for a new request.

        Raises ChangeoverRunning for a new request while another operation runs.
        """
        known = self._known.get(request_id)
        if known is None or (known.subject == subject and known.reason in _TO_REPEAT):
            known = self._replayed(request_id)
        if known is not None:
            if known.subject != subject:
                raise InvalidArgument("request_id", f"{request_id!r} was used for {known.subject} before; choose another one")
            return known
        if self._running is not None:
            raise ChangeoverRunning(
                f"{self._running.subject} is under way; ask for {subject} when it has ended",
                changeover_id=self._state().changeover_id,
            )
        self._last = Operation(subject, work())
        self._remember(request_id, self._last)
        return self._last

    def tell(self, event: pb.StageEvent) -> None:
        """Sends an event, with the state after it, to the running operation and the watchers."""
        update = Update(event=event, state=self._state())
        if self._running is not None:
            self._running.tell(update)
        self.watchers.tell(update)

    async def stop(self) -> None:
        """Cancels the running operation at its current point."""
        if self._running is not None:
            await self._running.stop()

    def _replayed(self, request_id: str) -> Operation | None:
        """Ended operation rebuilt from the request's last try in the journal; None if there is none, or it has no answer.

        A changeover that an earlier coordinator left interrupted is run now; its interruption is not its answer.
        """
        *tried, _ = attempt_ids(self._journal, request_id)
        written = self._journal.find(tried[-1]) if tried else None
        if written is None or written.error_reason in (*_UNANSWERED, *_TO_REPEAT):
            return None
        operation = Operation(f"phase {Phase.of(written.target)}", _ended(written))
        for event in (*self._journal.events(written.changeover_id), ending(written)):
            operation.tell(Update(event=event, state=self._state()))
        return operation

    def _remember(self, request_id: str, operation: Operation) -> None:
        self._known[request_id] = operation
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)


class Operated(ABC):
    """Node, or fleet of nodes, that a coordinator operates. Made inside the event loop, after the journal's epoch began."""

    def __init__(self, journal: Journal, *, boot_id: str, trainer_target: str, rollout_target: str) -> None:
        self._operations = Operations(journal, state=self.state)
        self.watchers = self._operations.watchers
        self._policy_version: int | None = None
        self._num_done, self._last_error, self._missed = journal.num_done(), journal.close_interrupted(), ""
        self._known = pb.NodeState(
            epoch=journal.epoch, boot_id=boot_id, trainer_target=trainer_target, rollout_target=rollout_target
        )

    @abstractmethod
    def state(self) -> pb.NodeState: ...

    @abstractmethod
    async def look(self) -> pb.NodeState:
        """State that is read after the running operation."""

    @abstractmethod
    def run_stage(self, stage: Stage, request_id: str) -> Operation: ...

    @abstractmethod
    async def _bring_to(self, phase: Phase, request_id: str) -> None: ...

    def acquire(self, phase: Phase, request_id: str) -> Operation:
        """Operation that leads to `phase`: the one this request id began, the running one, or a new one.

        Raises ChangeoverRunning while a different one runs.
        """
        subject = f"phase {phase}"
        self._operations.join(subject, request_id)
        return self._operations.begin(subject, request_id, lambda: self._bring_to(phase, request_id))

    async def stop(self) -> None:
        """Cancels the running operation at its current point; what it asked for stays in the journal as an intent without a result."""
        await self._operations.stop()

    def _state(self, at: Stage | None, **fields: Any) -> pb.NodeState:
        """at: None while the stage is unknown."""
        state = pb.NodeState(policy_version=self._policy_version, num_changeovers=self._num_done, **fields)
        state.MergeFrom(self._known)
        if at is not None:
            state.stage, state.next_stage = at.number, NEXT[at].number
            if (phase := phase_of(at)) is not None:
                state.phase = phase.number
        return state

    def _count(self, error: TasukiError | None) -> None:
        """Counts a changeover that has ended."""
        self._num_done += error is None
        self._last_error = f"{error.reason}: {error.message}" if error else ""


def held_event() -> pb.StageEvent:
    return pb.StageEvent(status=StageStatus.HELD.number, time=timestamp(time.time()))


def attempt_ids(journal: Journal, request_id: str) -> list[str]:
    """Ids under which the journal has the tries of a request, and one for the next try."""
    ids = [request_id]
    while journal.find(ids[-1]) is not None:
        ids.append(f"{request_id}~{len(ids) + 1}")
    return ids


async def _ended(changeover: pb.Changeover) -> None:
    if changeover.error_reason:
        raise from_reason(changeover.error_reason, changeover.error_message, {"changeover_id": changeover.changeover_id})
