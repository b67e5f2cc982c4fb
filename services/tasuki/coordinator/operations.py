"""CoordinatorService, and the operations that it begins: one at a time, each found by its request id, also in an earlier life's journal.

An operation outlives its callers; each caller reads its events from the first.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio

from tasuki.config.lock import Instance
from tasuki.coordinator.journal import Journal, ending, timestamp
from tasuki.coordinator.journal_file import id_number
from tasuki.coordinator.phases import phase_of
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import coordinator_pb2_grpc
from tasuki.v1.fleet_pb2 import FleetCommand
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
    StaleEpoch,
    StaleSequence,
    TasukiError,
    WeightsCorrupt,
    from_reason,
)
from tasuki.wire.stages import NEXT, Phase, Service, Stage, StageStatus

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


class Operated(ABC):
    """Node, or fleet of nodes, that a coordinator operates, one operation at a time. Made in the event loop, after the epoch began."""

    def __init__(self, journal: Journal, *, boot_id: str, trainer_target: str, rollout_target: str) -> None:
        self._journal = journal
        self._last: Operation | None = None
        self._begun: OrderedDict[str, Operation] = OrderedDict()
        """The latest operations, by request id."""
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self.watchers = Watchers()
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

    @property
    def _running(self) -> Operation | None:
        return None if self._last is None or self._last.is_over else self._last

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
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

    def acquire(self, phase: Phase, request_id: str) -> Operation:
        """Operation that leads to `phase`: the one this request id began, the running one, or a new one.

        Raises ChangeoverRunning while a different one runs.
        """
        subject = f"phase {phase}"
        if self._running is not None and self._running.subject == subject and request_id not in self._begun:
            self._remember(request_id, self._running)
        return self._operate(subject, request_id, lambda: self._bring_to(phase, request_id))

    def _operate(self, subject: str, request_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Operation:
        """Operation that this request id began, to be followed; a new one that does `work`, in its turn, for a new request.

        Raises ChangeoverRunning for a new request while another operation runs.
        """
        known = self._begun.get(request_id)
        if known is None or (known.subject == subject and known.reason in _TO_REPEAT):
            known = self._replayed(request_id)
        if known is not None:
            if known.subject != subject:
                raise InvalidArgument("request_id", f"{request_id!r} was used for {known.subject} before; choose another one")
            return known
        if self._running is not None:
            raise ChangeoverRunning(
                f"{self._running.subject} is under way; ask for {subject} when it has ended",
                changeover_id=self.state().changeover_id,
            )
        self._last = Operation(subject, work())
        self._remember(request_id, self._last)
        return self._last

    def announce(self, event: pb.StageEvent) -> None:
        """Sends an event, with the state after it, to the running operation and the watchers."""
        update = Update(event=event, state=self.state())
        if self._running is not None:
            self._running.tell(update)
        self.watchers.tell(update)

    async def stop(self) -> None:
        """Cancels the running operation at its current point; what it asked for stays in the journal as an intent without a result."""
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
            operation.tell(Update(event=event, state=self.state()))
        return operation

    def _remember(self, request_id: str, operation: Operation) -> None:
        self._begun[request_id] = operation
        if len(self._begun) > _KEPT:
            self._begun.popitem(last=False)

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


_Context = grpc.aio.ServicerContext[Any, Any]
_MAX_REQUEST_ID = 128
_DEFAULT_PAGE_SIZE = 50
_MAX_PAGE_SIZE = 1000


class FleetHold:
    """Attempt and epoch outlive this process in the journal. FleetFence refuses callers beside the fleet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sequence = 0
        """Sequence of the fleet's last command to this process; connections to an earlier one are closed."""

    def check(self, command: FleetCommand, *, is_look: bool = False) -> None:
        """Adopts the command's numbers as the highest. is_look: takes the last number again, since the channel repeats a lost read.

        Raises StaleEpoch for an earlier life of the fleet, StaleSequence for a command older than the last, and DiskFull.
        """
        given, known = (command.attempt, command.epoch), self._journal.fleet_epoch(command.name)
        if given < known:
            raise StaleEpoch(
                f"attempt {given[0]} of fleet {command.name!r} in its life {given[1]} is over: this node has seen attempt {known[0]}, "
                f"life {known[1]}",
                epoch=given[0],
                current_epoch=known[0],
            )
        if given > known:
            self._journal.take_fleet_epoch(command.name, attempt=command.attempt, epoch=command.epoch)
        elif command.sequence <= self._sequence - is_look:
            text = f"command {command.sequence} of the fleet comes after {self._sequence}"
            raise StaleSequence(text, sequence=command.sequence, current_sequence=self._sequence)
        self._sequence = command.sequence


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """One node's coordinator on the wire."""

    def __init__(
        self,
        node: Operated,
        journal: Journal,
        plan: Callable[[pb.PlanRequest], Awaitable[pb.PlanResponse]],
        *,
        instance: Instance,
        port_targets: Mapping[str, str],
    ) -> None:
        """node: a node, or a fleet, which clients see as one.

        port_targets: addresses of services by name, for callers at the coordinator's port."""
        self._hold = FleetHold(journal)
        self._port_targets = port_targets
        self._node, self._journal, self._plan, self._instance = node, journal, plan, instance

    async def Acquire(self, request: pb.AcquireRequest, context: _Context) -> AsyncIterator[pb.AcquireResponse]:
        if request.HasField("fleet"):
            self._hold.check(request.fleet)
        phase = Phase.of(request.phase)
        if phase is None:
            raise InvalidArgument("phase", "must be PHASE_TRAIN or PHASE_ROLLOUT")
        async for update in self._node.acquire(phase, _request_id(request.request_id)).follow():
            yield pb.AcquireResponse(event=update.event, state=self._state(update.state, context))

    async def RunStage(self, request: pb.RunStageRequest, context: _Context) -> pb.RunStageResponse:
        if request.HasField("fleet"):
            self._hold.check(request.fleet)
        stage = Stage.of(request.stage)
        if stage is None:
            raise InvalidArgument("stage", f"must be one of {', '.join(f'STAGE_{each}' for each in Stage)}")
        response = pb.RunStageResponse()
        async for update in self._node.run_stage(stage, _request_id(request.request_id)).follow():
            if update.event.stage == request.stage:
                response.event.CopyFrom(update.event)
            response.state.CopyFrom(self._state(update.state, context))
        received = self._journal.last(Stage.SYNC) if stage is Stage.SYNC else None
        if received is not None:
            response.sums.ParseFromString(received.answer)
        return response

    async def GetState(self, request: pb.GetStateRequest, context: _Context) -> pb.GetStateResponse:
        if not request.HasField("fleet"):
            return pb.GetStateResponse(state=self._state(self._node.state(), context))
        self._hold.check(request.fleet, is_look=True)
        return pb.GetStateResponse(state=self._state(await self._node.look(), context))

    async def WatchState(self, request: pb.WatchStateRequest, context: _Context) -> AsyncIterator[pb.WatchStateResponse]:
        with self._node.watchers.watching() as queue:
            yield pb.WatchStateResponse(state=self._state(self._node.state(), context))
            while (update := await queue.get()) is not None:
                yield pb.WatchStateResponse(state=self._state(update.state, context), event=update.event)

    async def ListChangeovers(self, request: pb.ListChangeoversRequest, context: _Context) -> pb.ListChangeoversResponse:
        size = request.page_size or _DEFAULT_PAGE_SIZE
        if size > _MAX_PAGE_SIZE:
            raise InvalidArgument("page_size", f"must be at most {_MAX_PAGE_SIZE}, is {size}")
        # No token given out here is longer; a number above SQLite's 64 bits would be our error, not the caller's.
        token = request.page_token
        if token and not (token.isascii() and token.isdigit() and len(token) <= 18):
            raise InvalidArgument("page_token", "is not one that ListChangeovers gave out")
        # One more than asked for tells whether there is another page.
        found = self._journal.changeovers(limit=size + 1, before=int(token) if token else None)
        page = found[:size]
        return pb.ListChangeoversResponse(
            changeovers=page, next_page_token=str(id_number(page[-1].changeover_id)) if len(found) > size else ""
        )

    async def Plan(self, request: pb.PlanRequest, context: _Context) -> pb.PlanResponse:
        return await self._plan(request)

    def _state(self, state: pb.NodeState, context: _Context) -> pb.NodeState:
        """State for one caller: at a port it has the services' ports, "" for a service without one."""
        told = pb.NodeState(instance_id=self._instance.id, lock_path=self._instance.lock_path)
        told.MergeFrom(state)
        if not context.peer().startswith("unix:"):
            told.trainer_target, told.rollout_target = (self._port_targets.get(name, "") for name in Service)
        return told


def _request_id(given: str) -> str:
    if len(given) > _MAX_REQUEST_ID:
        raise InvalidArgument("request_id", f"must have at most {_MAX_REQUEST_ID} characters, has {len(given)}")
    return given or uuid.uuid4().hex
