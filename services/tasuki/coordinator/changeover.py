"""One changeover: intent, act and result for each stage; if one fails, the finished ones are undone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from tasuki.coordinator.admission import Admission
from tasuki.coordinator.headroom import TAKES
from tasuki.coordinator.journal import Intent, Journal, Outcome, timestamp
from tasuki.coordinator.peers import Observed, Peers
from tasuki.coordinator.phases import advance, path, since_phase, turns_back, undo_path
from tasuki.v1.coordinator_pb2 import StageEvent
from tasuki.wire.errors import (
    DeadlineExceeded,
    DiskFull,
    InternalError,
    Interrupted,
    PeerUnavailable,
    StageOrder,
    StaleEpoch,
    StaleSequence,
    TasukiError,
)
from tasuki.wire.stages import RULES, Phase, Service, Stage, StageStatus
from tasuki.wire.tracing import CHANGEOVER_ID, NO_TRACER, REQUEST_ID, Span, SpanKind, Tracer, current, spanning

_log = logging.getLogger("tasuki.coordinator")
# After these errors the stage may be done, running or never begun. It is not sent again, but its undo is: a service runs commands one
# at a time in order, so the undo finds the stage finished, or is refused because it never began. DiskFull does not say which write
# failed, the intent or the result.
_OUTCOME_UNKNOWN = (DeadlineExceeded, DiskFull, InternalError, PeerUnavailable)

Tell = Callable[[StageEvent, Stage], None]
"""Takes what happened, and where the node is after it."""
Done = Callable[..., StageEvent]
"""Records a result, as `Journal.done` does."""
Restart = Callable[[Service, str], None]
"""Kills and restarts a service that hangs; takes the cause."""


class ChangeoverTrace:
    """Span of a changeover, child of the call that requested it."""

    def __init__(self, tracer: Tracer, *, changeover_id: str, target: Phase, request_id: str) -> None:
        self._tracer, self._changeover_id = tracer, changeover_id
        attributes = {REQUEST_ID: request_id, CHANGEOVER_ID: changeover_id}
        self._span = tracer.begin(f"changeover to {target}", kind=SpanKind.INTERNAL, attributes=attributes)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Makes calls in the block children of the changeover."""
        with current(self._span):
            yield

    @contextmanager
    def stage(self, intent: Intent) -> Iterator[Span]:
        """Span of a stage, or of its undo; parent of the calls in the block."""
        name = f"undo {intent.stage}" if intent.is_undo else f"stage {intent.stage}"
        attributes = {REQUEST_ID: intent.request_id, CHANGEOVER_ID: self._changeover_id}
        with self.around(), spanning(self._tracer.begin(name, kind=SpanKind.INTERNAL, attributes=attributes)) as span:
            yield span

    def end(self, error: TasukiError | None) -> None:
        if error is not None:
            self._span.fail(error.reason)
        self._span.end()


NO_TRACE = ChangeoverTrace(NO_TRACER, changeover_id="", target=Phase.TRAIN, request_id="")


@dataclass(slots=True)
class _Attempt:
    outcome: Outcome = field(default_factory=Outcome)


class Changeover:
    """Runs the stages of one changeover. `at` is the stage that the node is at."""

    def __init__(
        self,
        changeover_id: str,
        target: Phase,
        *,
        seen: Observed,
        journal: Journal,
        peers: Peers,
        tell: Tell,
        restart: Restart,
        admission: Admission | None = None,
        trace: ChangeoverTrace = NO_TRACE,
    ) -> None:
        """admission: None admits every stage."""
        self.id, self.target, self.trace = changeover_id, target, trace
        self.started = time.perf_counter()
        self._journal, self._peers, self._tell, self._restart = journal, peers, tell, restart
        self._admission = admission
        self._unreported: list[StageEvent] = []
        self.observe(seen)

    def observe(self, seen: Observed) -> None:
        """Adopts the state that the services report. Raises StageOrder if they contradict each other."""
        self.at = seen.place()
        self._is_on_the_way_back = seen.is_on_the_way_back
        self._boots = _boots(seen)

    def knows(self, seen: Observed) -> bool:
        """Whether both services are still in the lives that were last observed."""
        return self._boots == _boots(seen)

    async def bring_to_target(self) -> None:
        """Brings the node to `target`. If a stage fails, the finished ones are undone and its error is raised."""
        if self._is_on_the_way_back or self._lacks_publication() or turns_back(self.at, self.target):
            await self._take_back(since_phase(self.at))
        stages = path(self.at, self.target)
        for stage, following in zip_longest(stages, stages[1:]):
            finished = since_phase(self.at)
            # Otherwise the next intent, or the changeover's outcome, is recorded without a wait for the services' memory.
            waits = following in TAKES
            try:
                await self._run(stage, done=self._journal.done if waits else self._journal.done_before_next)
            except TasukiError as error:
                if isinstance(error, DeadlineExceeded):
                    self._restart(RULES[stage].service, f"{stage} did not end in time: {error.message}")
                suspect = (stage,) if isinstance(error, _OUTCOME_UNKNOWN) else ()
                await self._take_back_after(error, (*finished, *suspect))
                raise

    def _lacks_publication(self) -> bool:
        """Whether SYNC is still to come but no coordinator learned the answer of LOAD_WEIGHTS."""
        return self.at in (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS) and self._journal.published() is None

    async def make_room(self) -> None:
        """Undoes LOAD_TRAINER, so that an engine can start on the trainer's GPUs.

        Raises GradientsPending, and Interrupted once the trainer has left: `target` then takes another changeover.
        """
        await self._take_back((Stage.LOAD_TRAINER, *since_phase(self.at)))
        raise Interrupted(f"rollout was lost; it comes back before phase {self.target} is reached")

    async def run(self, stage: Stage) -> None:
        """Runs one stage. Raises its error, and StageOrder if another stage must come first.

        Raises OutOfGpuMemory, with nothing recorded or sent, if the stage has no room.
        """
        await self._run(stage, done=self._journal.done)

    async def _run(self, stage: Stage, *, done: Done) -> None:
        after = advance(self.at, stage)
        published = self._journal.published() if stage is Stage.SYNC else Outcome()
        if published is None:
            text = "the answer of LOAD_WEIGHTS was lost with an earlier coordinator; acquire phase TRAIN, which takes it back"
            raise StageOrder(text, stage=stage, after=self.at)
        if self._admission is not None:
            await self._admission.admit(stage, trainer_boot_id=self._boots["trainer_boot_id"])
        intent = self._intend(stage, is_undo=False)
        self._tell(started_event(intent), self.at)
        with self._recorded(intent, leads_to=after, done=done) as attempt:
            attempt.outcome = await self._peers.carry_out(intent, published=published.answer)

    async def _take_back(self, stages: Sequence[Stage]) -> None:
        """Undoes `stages`, given in the order they ran, and observes the services afterwards."""
        for stage in undo_path(stages):
            intent = self._intend(stage, is_undo=True)
            try:
                with self._recorded(intent, leads_to=self.at, done=self._journal.done) as attempt:
                    attempt.outcome = await self._peers.carry_out(intent, published=b"")
            except StageOrder:
                # The stage never ran; or rollout went on after it was observed, and the trainer must not return beside it.
                if stage is Stage.RESUME_WEIGHTS and not (await self._peers.observe()).is_asleep:
                    raise
        seen = await self._peers.observe()
        for service in seen.absent:
            if self._boots[f"{service}_boot_id"]:  # it counts as freshly started, but may still hold all its memory
                raise PeerUnavailable(f"{service} does not say where it is after the undo", peer=service)
        self.observe(seen)

    async def _take_back_after(self, cause: TasukiError, stages: Sequence[Stage]) -> None:
        """Undoes as `_take_back`, for a caller that raises `cause`: an error of the undo is journalled and logged."""
        try:
            await self._take_back(stages)
        except TasukiError as error:
            _log.error("event=undo_failed changeover=%s cause=%s reason=%s", self.id, cause.reason, error.reason)

    def _intend(self, stage: Stage, *, is_undo: bool) -> Intent:
        """Records an intent, with which the result before it is on disk."""
        intent = self._journal.intend(stage, self.id, is_undo=is_undo, **self._boots)
        self.report()
        return intent

    @contextmanager
    def _recorded(self, intent: Intent, *, leads_to: Stage, done: Done) -> Iterator[_Attempt]:
        """Records the result of the command that the block sends, after its intent."""
        started, attempt = time.perf_counter(), _Attempt()
        try:
            with self.trace.stage(intent) as span:
                yield attempt
                span.set("tasuki.bytes", attempt.outcome.num_bytes)
        except TasukiError as error:
            self._unreported.append(self._journal.failed(intent, error, seconds=time.perf_counter() - started))
            self.report()
            if isinstance(error, StaleSequence):
                self._journal.pass_over(int(error.metadata["current_sequence"]))
            if isinstance(error, StaleEpoch) and not self._journal.has_epoch(int(error.metadata["current_epoch"])):
                # No coordinator ever had this epoch, so none can continue from it; only a restart of the service clears it.
                self._restart(_service_of(intent), f"it takes stages of an epoch that no coordinator had: {error.message}")
            raise
        self.at = leads_to
        self._unreported.append(done(intent, attempt.outcome, seconds=time.perf_counter() - started))
        if self._journal.is_on_disk:
            self.report()

    def report(self) -> None:
        """Reports the results that are on disk by now."""
        while self._unreported:
            event = self._unreported.pop(0)
            _log.info(
                "event=stage changeover=%s stage=%s status=%s seconds=%.4f bytes=%d reason=%s",
                event.changeover_id,
                Stage.of(event.stage),
                StageStatus.of(event.status),
                event.seconds,
                event.bytes,
                event.error_reason or "-",
            )
            self._tell(event, self.at)


def started_event(intent: Intent) -> StageEvent:
    status = StageStatus.STARTED.number
    return StageEvent(changeover_id=intent.changeover_id, stage=intent.stage.number, status=status, time=timestamp(intent.time))


def _service_of(intent: Intent) -> Service:
    """Service that runs the stage, or its undo."""
    undo = RULES[intent.stage].undo if intent.is_undo else intent.stage
    return RULES[undo if isinstance(undo, Stage) else intent.stage].service


def _boots(seen: Observed) -> dict[str, str]:
    """Boot ids under the names that an intent uses."""
    return {"trainer_boot_id": seen.trainer_boot_id, "rollout_boot_id": seen.rollout_boot_id}
