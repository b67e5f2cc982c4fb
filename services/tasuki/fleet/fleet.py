"""The coordinator of all nodes as one: offers a node coordinator's operations and runs each on every node."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tasuki.coordinator.changeover import ChangeoverTrace, log_stage, started_event
from tasuki.coordinator.journal import Outcome, ending
from tasuki.coordinator.operations import LOSSES, Operated, Operation, attempt_ids, held_event
from tasuki.coordinator.phases import phase_of
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.nodes import NodePeer
from tasuki.fleet.rules import (
    COMMIT,
    PREPARE,
    TO_TRAIN,
    TRAIN,
    Decision,
    Step,
    agreed,
    common_place,
    errors_of,
    next_step,
    place,
    serves,
    worst,
)
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2 import NodeState, RunStageResponse, StageEvent
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    HeldByFleet,
    Interrupted,
    NotJoined,
    PeerUnavailable,
    PermissionDenied,
    StageOrder,
    StaleEpoch,
    TasukiError,
)
from tasuki.wire.stages import RULES, Phase, Stage
from tasuki.wire.tracing import NO_TRACER, Tracer

_PAUSE_S = 0.2
_HOPELESS = (FleetEnded, HeldByFleet, StaleEpoch)
"""Errors for which a retry is useless."""
_Answer = TypeVar("_Answer", NodeState, RunStageResponse)


class FleetChangeover:
    """Runs the stages of one changeover on every node."""

    def __init__(
        self,
        changeover_id: str,
        *,
        states: list[NodeState],
        journal: FleetJournal,
        peers: Sequence[NodePeer],
        tell: Callable[[StageEvent], None],
        patience_s: float,
        trace: ChangeoverTrace,
    ) -> None:
        """states: the nodes' last reported states, by rank, kept up to date. patience_s: how long an unreachable node is retried."""
        self._id, self._states, self._journal, self._peers = changeover_id, states, journal, peers
        self._tell, self._patience_s, self._trace = tell, patience_s, trace

    async def bring_to_rollout(self) -> None:
        """Brings all nodes to ROLLOUT, from TRAIN or, if a decision is pending, from anywhere.

        A failure before the decision returns all nodes to TRAIN and is raised. After it, raises FleetEnded if a node cannot follow.
        """
        await self._commit(self._journal.decision() or await self._prepare())

    async def bring_to_train(self) -> None:
        """Runs the stages towards TRAIN on all nodes; stragglers follow individually. Raises the error of a node after `patience_s`."""
        try:
            for stage in TO_TRAIN:
                if common_place(self._states) is RULES[stage].after:
                    await self._run_everywhere(stage)
        except TasukiError as error:
            _log.warning("event=alone changeover=%s reason=%s", self._id, error.reason)
        await self._lead_all(TRAIN)

    async def _prepare(self) -> Decision:
        finished: list[Stage] = []
        try:
            await self._lead_all(TRAIN)
            answers: list[RunStageResponse] = []
            for stage in PREPARE:
                answers = await self._run_everywhere(stage)
                finished.append(stage)
            received = agreed([answer.sums if answer.HasField("sums") else None for answer in answers])
            decision = self._journal.decide(self._id, received)
        except TasukiError as cause:
            try:
                await self._lead_all(TRAIN)
            except TasukiError as error:
                _log.error("event=undo_failed changeover=%s cause=%s reason=%s", self._id, cause.reason, error.reason)
            else:
                for stage in reversed(finished):
                    intent = self._journal.intend(stage, self._id, is_undo=True, trainer_boot_id="", rollout_boot_id="")
                    self._tell(self._journal.done(intent, Outcome(), seconds=0.0))
            raise
        _log.info("event=decided changeover=%s version=%d nodes=%d", self._id, received.policy_version, len(self._peers))
        return decision

    async def _commit(self, decision: Decision) -> None:
        for stage in COMMIT:
            digests, at = {state.weights_digest for state in self._states}, common_place(self._states)
            if digests == {decision.weights_digest} and at is RULES[stage].after:
                try:
                    await self._run_everywhere(stage)
                    continue
                except TasukiError as error:
                    _log.warning("event=forward changeover=%s stage=%s reason=%s", self._id, stage, error.reason)
            try:
                await self._lead_all(stage, decision)
            except TasukiError as error:
                rank = error.metadata.get("node_rank", "")
                text = f"version {decision.policy_version} was decided, and not every node serves it: {error.message}"
                raise FleetEnded(text, node_rank=rank, cause=error.reason) from error

    async def _run_everywhere(self, stage: Stage) -> list[RunStageResponse]:
        """The barrier: runs a stage on all nodes at once and waits for all. Then raises the worst error."""
        intent = self._journal.intend(stage, self._id, is_undo=False, trainer_boot_id="", rollout_boot_id="")
        self._tell(started_event(intent))
        started = time.perf_counter()
        with self._trace.stage(intent) as span:
            outcomes = await self._ask(stage, self._peers, lambda peer, name: peer.run_stage(stage, name))
            seconds = time.perf_counter() - started
            if errors := errors_of(outcomes):
                error = worst(errors)
                self._report(self._journal.failed(intent, error, seconds=seconds))
                raise error
            answers = [outcome for outcome in outcomes if isinstance(outcome, RunStageResponse)]
            num_bytes = sum(answer.event.bytes for answer in answers)
            span.set("tasuki.bytes", num_bytes)
        version = answers[0].sums.policy_version if answers[0].HasField("sums") else None
        self._report(self._journal.done(intent, Outcome(num_bytes, policy_version=version), seconds=seconds))
        return answers

    def _report(self, event: StageEvent) -> None:
        log_stage(event)
        self._tell(event)

    async def _lead_all(self, until: Stage, decision: Decision | None = None) -> None:
        """Leads every node to `until` by itself, all at once, and waits for all. Then raises the worst error."""
        if decision is None and common_place(self._states) is until:
            return
        leading = (self._lead(peer, until, decision) for peer in self._peers)
        outcomes = await asyncio.gather(*leading, return_exceptions=True)
        if errors := errors_of(outcomes):
            raise worst(errors)

    async def _lead(self, peer: NodePeer, until: Stage, decision: Decision | None) -> None:
        """Looks where a node is and asks for its next step until it is there. Raises the last error after `patience_s`."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._patience_s
        while True:
            try:
                state = await self._step(peer, Step.LOOK)
                following = next_step(state, until=until, decision=decision)
                if following is None:
                    return
                await self._step(peer, following)
                if clock() > ends:
                    raise DeadlineExceeded(f"the node has not arrived after {self._patience_s:g} s")
            except TasukiError as error:
                if isinstance(error, _HOPELESS) or clock() > ends:
                    raise
                _log.warning("event=miss changeover=%s node_rank=%d reason=%s", self._id, peer.rank, error.reason)
                await asyncio.sleep(_PAUSE_S)

    async def _step(self, peer: NodePeer, step: Stage | Step) -> NodeState:
        async def call(peer: NodePeer, name: str) -> NodeState:
            if isinstance(step, Stage):
                return (await peer.run_stage(step, name)).state
            return await (peer.look() if step is Step.LOOK else peer.acquire_train(name))

        with self._trace.around():
            (outcome,) = await self._ask(step, [peer], call)
        if isinstance(outcome, TasukiError):
            raise outcome
        return outcome

    async def _ask(
        self, step: Stage | Step, peers: Sequence[NodePeer], call: Callable[[NodePeer, str], Awaitable[_Answer]]
    ) -> list[_Answer | TasukiError]:
        """Asks nodes at once, waits for all, and journals each request and its outcome. call: gets a request id."""
        ids = self._journal.begin_steps(step, self._id, ranks=[peer.rank for peer in peers])
        calls = (call(peer, f"fleet-{self._journal.epoch}-{step_id}") for peer, step_id in zip(peers, ids, strict=True))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors_of(outcomes)
        known = [outcome for outcome in outcomes if isinstance(outcome, NodeState | RunStageResponse | TasukiError)]
        after = [outcome.state if isinstance(outcome, RunStageResponse) else outcome for outcome in known]
        self._journal.end_steps(dict(zip(ids, after, strict=True)))
        for peer, outcome in zip(peers, after, strict=True):
            self._states[peer.rank] = NodeState() if isinstance(outcome, TasukiError) else outcome
        return known


_log = logging.getLogger("tasuki.fleet")
_POLL_S = 0.2
_MAX_TRIES = 5
_LOSSES = (*LOSSES, Interrupted, StageOrder)
"""Errors as of a node's coordinator, plus those of a node that moved by itself, for example by restarting."""


class Fleet(Operated):
    """Runs one operation at a time."""

    def __init__(
        self,
        journal: FleetJournal,
        peers: Sequence[NodePeer],
        *,
        boot_id: str,
        target: str,
        patience_s: float,
        end: Callable[[TasukiError], None],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """peers: by rank. target: where clients find the fleet's trainer and rollout. patience_s: how long to wait for a node.

        end: called if the fleet cannot continue.
        """
        super().__init__(journal, boot_id=boot_id, trainer_target=target, rollout_target=target)
        self._journal, self._peers, self._tracer = journal, peers, tracer
        self._patience_s, self._end = patience_s, end
        self._states = [pb.NodeState() for _ in peers]
        """The nodes' last reported states, by rank."""
        self._is_known = False
        self._policy_version = self._decided_version()
        self._changeover_id = ""

    def state(self) -> NodeState:
        last_error = self._missed or self._last_error
        return self._state(common_place(self._states), changeover_id=self._changeover_id, last_error=last_error)

    async def look(self) -> NodeState:
        """Returns the state after running work has finished and every node was read. Raises the error of a node that does not answer."""
        async with self._turn():
            await self._look()
            return self.state()

    def run_stage(self, stage: Stage, request_id: str) -> Operation:
        """Raises PermissionDenied: a fleet moves through whole phases."""
        raise PermissionDenied(f"a fleet runs no single stage such as {stage}; ask for a phase: Acquire")

    async def recover(self) -> None:
        """Reads all nodes after they joined. Completes a pending decision; otherwise returns nodes from the middle of the ring to TRAIN."""
        while not self._is_known:
            try:
                async with self._turn():
                    await self._look()
                    self._is_known = True
                    request_id = f"recovery-{self._journal.epoch}"
                    if self._journal.pending() is not None:
                        await self._bring_to(Phase.ROLLOUT, request_id)
                    elif phase_of(common_place(self._states) or Stage.SYNC) is None:
                        _log.warning("event=recover places=%s", ",".join(place(state) or "-" for state in self._states))
                        await self._bring_to(Phase.TRAIN, request_id)
                self._missed = ""
            except TasukiError as error:  # also of a journalled changeover
                told = f"{error.reason}: {error.message}"
                if told != self._missed and not isinstance(error, NotJoined):
                    _log.warning("event=recover_waits reason=%s message=%a", error.reason, error.message)
                    self._missed = told
            await asyncio.sleep(0 if self._is_known else _POLL_S)

    async def _bring_to(self, phase: Phase, request_id: str) -> None:
        """Retries, as a new changeover, if a node was unreachable on the way and is back.

        First completes a decision of an earlier life of the fleet, since it cannot be undone.
        """
        async with self._turn():
            for intent in self._journal.unresolved():  # the nodes, and not the journal, show how it ended
                self._journal.failed(intent, Interrupted(f"the fleet stopped before {intent.stage} was answered"), seconds=0.0)
            if self._journal.pending() is not None:
                await self._wait_ready()
                await self._try(Phase.ROLLOUT, f"{request_id}.forward")
            for number in range(1, _MAX_TRIES + 1):
                await self._wait_ready()
                decision = self._journal.decision()
                serve = all(serves(state, decision) for state in self._states)
                if serve if phase is Phase.ROLLOUT else common_place(self._states) is TRAIN:
                    self.announce(held_event())
                    return
                try:
                    await self._try(phase, request_id)
                except _LOSSES as error:
                    if number == _MAX_TRIES:
                        raise
                    _log.warning("event=try_again phase=%s number=%d reason=%s", phase, number + 1, error.reason)
                    await asyncio.sleep(_POLL_S * number)
                else:
                    return

    async def _try(self, phase: Phase, request_id: str) -> None:
        name, started = attempt_ids(self._journal, request_id)[-1], time.perf_counter()
        origin = common_place(self._states) or next(filter(None, map(place, self._states)), TRAIN)
        self._changeover_id = changeover_id = self._journal.begin_changeover(name, origin=origin, target=phase)
        self._journal.note_states(changeover_id, self._states)
        trace = ChangeoverTrace(self._tracer, changeover_id=changeover_id, target=phase, request_id=name)
        changeover = FleetChangeover(
            changeover_id,
            states=self._states,
            journal=self._journal,
            peers=self._peers,
            tell=self.announce,
            patience_s=self._patience_s,
            trace=trace,
        )
        failure: TasukiError | None = None
        try:
            await (changeover.bring_to_rollout() if phase is Phase.ROLLOUT else changeover.bring_to_train())
        except TasukiError as error:
            failure = error
        version = self._decided_version() if failure is None and phase is Phase.ROLLOUT else None
        seconds = time.perf_counter() - started
        ended = self._journal.end_changeover(changeover_id, seconds=seconds, policy_version=version, error=failure)
        trace.end(failure)
        self._changeover_id = ""
        self._count(failure)
        self._policy_version = self._policy_version if version is None else version
        self.announce(ending(ended))
        if isinstance(failure, FleetEnded):
            self._end(failure)
        if failure is not None:
            raise failure

    async def _wait_ready(self) -> None:
        """Waits until every node knows its place, at most `patience_s`; after that, the operation itself fails with the reason."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._patience_s
        while True:
            try:
                await self._look()
            except PeerUnavailable:
                if clock() > ends:
                    raise
            else:
                if clock() > ends or all(map(place, self._states)):
                    return
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        """Reads all nodes. Raises the worst error, after taking the states of the others."""
        seen = await asyncio.gather(*(peer.look() for peer in self._peers), return_exceptions=True)
        errors = errors_of(seen)
        self._states[:] = [state if isinstance(state, pb.NodeState) else pb.NodeState() for state in seen]
        if errors:
            raise worst(errors)

    def _decided_version(self) -> int | None:
        decision = self._journal.decision()
        return None if decision is None else decision.policy_version
