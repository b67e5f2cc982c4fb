"""Node of a coordinator: its stage, the running operation, and its watchers."""

import asyncio
import hashlib
import logging
import time
from contextlib import suppress

from tasuki.coordinator.admission import Admission
from tasuki.coordinator.changeover import Changeover, ChangeoverTrace, Peers, Restart
from tasuki.coordinator.journal import Journal, Outcome, ending
from tasuki.coordinator.operations import LOSSES, Operated, Operation, attempt_ids, held_event
from tasuki.coordinator.phases import Observed, advance, leads_to, phase_of, since_phase, turns_back
from tasuki.v1.coordinator_pb2 import NodeState, StageEvent
from tasuki.wire.errors import DiskFull, EnginePoisoned, Interrupted, PeerUnavailable, StageOrder, StaleEpoch, TasukiError
from tasuki.wire.stages import HOLDS, Phase, Stage, StageStatus
from tasuki.wire.tracing import NO_TRACER, Tracer

_log = logging.getLogger("tasuki.coordinator")
_POLL_S, _POLL_IDLE_S = 0.2, 0.02
_HOLDS_WEIGHTS = (Stage.SYNC, Stage.OFFLOAD, Stage.RESUME_KV, Stage.DRAIN, Stage.PAUSE_KV)
_WITH_WEIGHTS = (Stage.RESUME_KV, Stage.DRAIN, Stage.PAUSE_KV)
"""Stages at which rollout still holds weights from RESUME_WEIGHTS, although a phase has held since then."""
_MAX_TRIES = 5
_RESTART_S = 10.0
"""Longest wait for the supervisor to end a service that must be restarted."""


class Node(Operated):
    """Runs one operation at a time."""

    def __init__(
        self,
        journal: Journal,
        peers: Peers,
        *,
        boot_id: str,
        trainer_target: str,
        rollout_target: str,
        restart: Restart,
        recovery_timeout_s: float,
        admission: Admission | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """recovery_timeout_s: longest wait of a changeover for a missing service. admission: None admits every stage."""
        super().__init__(journal, boot_id=boot_id, trainer_target=trainer_target, rollout_target=rollout_target)
        self._peers = peers
        self._restart, self._recovery_timeout_s = restart, recovery_timeout_s
        self._waiting = self._poison = ""
        """Service that is waited for, and the reason to restart rollout, as observed last; empty if none."""
        self._admission, self._tracer = admission, tracer
        self._at: Stage | None = None
        self._open: Changeover | None = None

    def state(self) -> NodeState:
        received = self._journal.last(Stage.SYNC) if self._at in _HOLDS_WEIGHTS else None
        poison = f"rollout is unusable until it is restarted: {self._poison}" if self._poison else ""
        return self._state(
            self._at,
            changeover_id=self._open.id if self._open else "",
            last_error="; ".join(part for part in (self._missed or self._last_error, poison, self._waiting) if part),
            weights_digest=b"" if received is None else hashlib.sha256(received.answer).digest(),
        )

    async def look(self) -> NodeState:
        """State that the services report, after the running operation. Has no stage if they do not answer, or contradict each other."""
        async with self._turn():
            try:
                await self._look()
            except (PeerUnavailable, StageOrder) as error:
                self._at, self._missed = None, f"{error.reason}: {error.message}"
            return self.state()

    def run_stage(self, stage: Stage, request_id: str) -> Operation:
        """Operation that runs one stage. Raises ChangeoverRunning while another one runs."""
        return self._operate(f"stage {stage}", request_id, lambda: self._run_single(stage, request_id))

    async def recover(self) -> None:
        """Observes the services once they answer, and brings a node in the middle of the ring to TRAIN."""
        while self._at is None:
            with suppress(DiskFull, PeerUnavailable, StageOrder):
                async with self._turn():
                    await self._look()
                    if self._at is not None and phase_of(self._at) is None:
                        _log.warning("event=recover at=%s", self._at)
                        with suppress(TasukiError):  # journalled, and told by the state
                            await self._bring_to(Phase.TRAIN, f"recovery-{self._journal.epoch}")
                        return
            await asyncio.sleep(_POLL_S if self._at is None else 0)

    async def _bring_to(self, phase: Phase, request_id: str) -> None:
        """Retries, as another changeover, if a service was lost on the way and has come back."""
        async with self._turn():
            for number in range(1, _MAX_TRIES + 1):
                seen = await self._wait_ready(phase)
                at = self._take(seen)
                if phase_of(at) is phase and not seen.is_on_the_way_back:
                    self._tell(held_event(), at)
                    return
                self._close_left(seen, phase)
                changeover = self._begin(request_id, seen, target=phase)
                # An engine that is being restarted takes what memory is free, and waits for the trainer to leave.
                makes_room = phase is Phase.ROLLOUT and seen.trainer_is_in_the_way
                try:
                    await (changeover.make_room() if makes_room else changeover.bring_to_target())
                except TasukiError as error:
                    cause = error if makes_room else await self._cause(error, seen)
                else:
                    self._at = changeover.at
                    self._close(changeover)
                    return
                self._close(changeover, cause)
                if number == _MAX_TRIES or not isinstance(cause, (*LOSSES, Interrupted)):
                    raise cause
                _log.warning("event=try_again phase=%s number=%d reason=%s", phase, number + 1, cause.reason)

    async def _wait_ready(self, phase: Phase) -> Observed:
        """State of both services once none runs a command of an earlier coordinator and none needed to reach `phase` is missing.

        Raises PeerUnavailable, or EnginePoisoned, if one does not come back in time.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + self._recovery_timeout_s
        while True:
            seen = await self._peers.observe()
            if seen.in_stage:
                if clock() > ends:
                    seen.require_all()
                self._waiting = f"waiting for {seen.in_stage[0]} to end a stage that was cut off"
                await asyncio.sleep(_POLL_IDLE_S)
                continue
            lacking, self._poison = seen.lacks(phase), seen.poison
            self._waiting = "" if lacking is None else f"waiting for {lacking} to come back"
            if lacking is None:
                return seen
            if clock() > ends and seen.poison:
                raise EnginePoisoned(f"rollout has not been restarted in {self._recovery_timeout_s:g} s: {seen.poison}")
            if clock() > ends:
                raise PeerUnavailable(f"{lacking} did not come back in {self._recovery_timeout_s:g} s", peer=lacking)
            await asyncio.sleep(_POLL_S)

    def _close_left(self, seen: Observed, phase: Phase) -> None:
        """Ends the changeover that RunStage began, before another begins. Its caller has undone it, or `phase` does."""
        if self._open is not None:
            at = seen.place()
            is_undone = self._open.knows(seen) and (phase_of(at) is not None or turns_back(at, phase))
            left = Interrupted(f"left at {at} when phase {phase} was asked for")
            self._close(self._open, left, status=StageStatus.UNDONE if is_undone else StageStatus.FAILED)

    async def _cause(self, error: TasukiError, seen: Observed) -> TasukiError:
        """Observes the node after a failed changeover. A service gone or restarted since `seen` is its cause."""
        self._at = None
        now = await self._peers.observe()
        if isinstance(error, StaleEpoch) and not self._journal.has_epoch(int(error.metadata["current_epoch"])):
            clock = asyncio.get_running_loop().time
            ends = clock() + _RESTART_S  # the changeover has asked for it
            while now.restarted_since(seen) is None and clock() < ends:
                await asyncio.sleep(_POLL_S)
                now = await self._peers.observe()
        if not now.absent and not now.in_stage:
            with suppress(StageOrder):  # then nobody knows where the node is, and the state says so
                self._take(now)
        lost = now.restarted_since(seen)
        if lost is None and isinstance(error, StageOrder) and self._at is not None:
            # A single stage without an answer was carried out late, after the services were asked.
            return PeerUnavailable(f"a service went on after it was seen ({error.message})")
        if lost is None or isinstance(error, LOSSES):
            return error
        return PeerUnavailable(f"{lost} was lost in the middle of the changeover ({error.reason}: {error.message})", peer=lost)

    async def _run_single(self, stage: Stage, request_id: str) -> None:
        """Runs one stage, without undo. The stages from one phase to the next are journalled as one changeover."""
        async with self._turn():
            seen, at = await self._look()
            advance(at, stage)
            target = leads_to(at)
            if self._open is not None and (self._open.target is not target or not self._open.knows(seen)):
                self._close_left(seen, target)  # what was restarted may have moved the node
            changeover = self._open or self._begin(request_id, seen, target=target)
            changeover.observe(seen)
            await changeover.run(stage, done=self._journal.done)
            if phase_of(stage) is not None:
                self._close(changeover)

    async def _look(self) -> tuple[Observed, Stage]:
        seen = await self._peers.observe()
        seen.require_all()
        return seen, self._take(seen)

    def _take(self, seen: Observed) -> Stage:
        """Adopts the state that the services report. Raises StageOrder if they contradict each other."""
        self._poison = seen.poison
        if seen.served_version is not None:
            self._policy_version = seen.served_version
        elif self._policy_version is None:
            self._policy_version = self._journal.served_version(seen.rollout_boot_id)
        try:
            at = seen.place()
        except StageOrder as error:
            self._at, self._missed = None, f"{error.reason}: {error.message}"
            raise
        resolve_intents(self._journal, at)
        self._at, self._missed = at, ""
        return at

    def _begin(self, request_id: str, seen: Observed, *, target: Phase) -> Changeover:
        request_id = attempt_ids(self._journal, request_id)[-1]
        changeover_id = self._journal.begin_changeover(request_id, origin=seen.place(), target=target)
        self._open = Changeover(
            changeover_id,
            target,
            seen=seen,
            journal=self._journal,
            peers=self._peers,
            tell=self._tell,
            restart=self._restart,
            admission=self._admission,
            trace=ChangeoverTrace(self._tracer, changeover_id=changeover_id, target=target, request_id=request_id),
        )
        return self._open

    def _close(
        self, changeover: Changeover, error: TasukiError | None = None, *, status: StageStatus = StageStatus.FAILED
    ) -> None:
        """status: of a changeover with an error."""
        seconds = time.perf_counter() - changeover.started
        serves = error is None and self._at is HOLDS[Phase.ROLLOUT]
        published = self._journal.last(Stage.LOAD_WEIGHTS) if serves else None
        version = published.policy_version if published else None
        ended = self._journal.end_changeover(changeover.id, seconds=seconds, policy_version=version, error=error, status=status)
        changeover.report()
        changeover.trace.end(error)
        self._open = None
        self._count(error)
        if version is not None:
            self._policy_version = version
        self._tell(ending(ended), self._at)

    def _tell(self, event: StageEvent, at: Stage | None) -> None:
        """Sends an event to the running operation and the watchers; the node is at `at` after it."""
        self._at = at
        self.announce(event)


def resolve_intents(journal: Journal, at: Stage) -> None:
    """Gives stages without a result the outcome that the services show."""
    for intent in journal.unresolved():
        is_left = intent.stage in (at, *since_phase(at)) or (intent.stage is Stage.RESUME_WEIGHTS and at in _WITH_WEIGHTS)
        if is_left is not intent.is_undo:
            journal.done(intent, Outcome(), seconds=0.0)
        else:
            journal.failed(intent, Interrupted(f"the coordinator stopped before {intent.stage} was answered"), seconds=0.0)
