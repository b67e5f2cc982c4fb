"""One changeover of all nodes: a barrier at each stage and one decision. Before the decision it can be undone, after it only completed."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tasuki.coordinator.changeover import ChangeoverTrace, log_stage, started_event
from tasuki.coordinator.journal import Outcome
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
    worst,
)
from tasuki.v1.coordinator_pb2 import NodeState, RunStageResponse, StageEvent
from tasuki.wire.errors import DeadlineExceeded, FleetEnded, HeldByFleet, StaleEpoch, TasukiError
from tasuki.wire.stages import RULES, Stage

_log = logging.getLogger("tasuki.fleet")
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
