"""One changeover of all nodes: a barrier at each stage and one decision. Before the decision it can be undone, after it only completed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tasuki.coordinator.changeover_trace import NO_TRACE, ChangeoverTrace
from tasuki.coordinator.records import Intent, Outcome, StageEvent, Status
from tasuki.fleet.journal import FleetJournal, StepIntent, StepResult
from tasuki.fleet.node_peer import NodePeer
from tasuki.fleet.records import Decision, NodeView, StageAnswer, Sums
from tasuki.fleet.rules import COMMIT, PREPARE, TO_TRAIN, TRAIN, Step, agreed, common_place, step_forward, worst
from tasuki.memory.stages import Phase, Stage
from tasuki.wire.errors import DeadlineExceeded, FleetEnded, HeldByFleet, StageOrder, StaleEpoch, TasukiError

_log = logging.getLogger("tasuki.fleet")
_PAUSE_S = 0.2
_HOPELESS = (FleetEnded, HeldByFleet, StaleEpoch)
"""Errors for which a retry is useless."""
_Answer = TypeVar("_Answer")

Tell = Callable[[StageEvent], None]


class FleetChangeover:
    """Runs the stages of one changeover on every node. `views`: the nodes' last reported states, by rank."""

    def __init__(
        self,
        changeover_id: str,
        target: Phase,
        *,
        views: Sequence[NodeView],
        journal: FleetJournal,
        peers: Sequence[NodePeer],
        tell: Tell,
        patience_s: float,
        trace: ChangeoverTrace = NO_TRACE,
    ) -> None:
        """patience_s: how long an unreachable node is retried."""
        self.id, self.target, self.views, self.trace = changeover_id, target, list(views), trace
        self.started = time.perf_counter()
        self._journal, self._peers, self._tell, self._patience_s = journal, peers, tell, patience_s
        self._finished: list[Stage] = []
        self._received: Sums | None = None

    async def bring_to_rollout(self) -> None:
        """Brings all nodes to ROLLOUT, from TRAIN or, if a decision is pending, from anywhere.

        A failure before the decision returns all nodes to TRAIN and is raised. After it, raises FleetEnded if a node cannot follow.
        """
        decision = self._journal.decision()
        if decision is None:
            decision = await self._prepare()
        await self.commit(decision)

    async def _prepare(self) -> Decision:
        try:
            if common_place(self.views) is not TRAIN:
                await self.go_back()
            for stage in PREPARE:
                await self.run(stage)
            return self._decide()
        except TasukiError as error:
            await self._take_back(error)
            raise

    async def run(self, stage: Stage) -> None:
        """Runs a stage on all nodes. SYNC ends with the comparison of weights, OFFLOAD begins with the decision.

        Raises WeightsDiffer, and StageOrder if no comparison allows a decision.
        """
        if stage is COMMIT[0] and self._journal.decision() is None:
            self._decide()
        answers = await self._run_everywhere(stage)
        if stage is PREPARE[-1]:
            self._received = agreed({answer.view.rank: answer.sums for answer in answers})

    def _decide(self) -> Decision:
        received = self._received
        if received is None:
            text = "what the nodes received was not compared, or differs; acquire phase TRAIN to undo it"
            raise StageOrder(text, stage=COMMIT[0])
        decision = self._journal.decide(self.id, received)
        _log.info("event=decided changeover=%s version=%d nodes=%d", self.id, received.policy_version, len(self._peers))
        return decision

    async def commit(self, decision: Decision) -> None:
        """Runs the stages after the decision. Raises FleetEnded if a node does not follow within `patience_s`."""
        for stage in COMMIT:
            if all(view.weights_digest == decision.weights_digest and view.at is _before(stage) for view in self.views):
                try:
                    await self._run_everywhere(stage)
                    continue
                except TasukiError as error:
                    _log.warning("event=forward changeover=%s stage=%s reason=%s", self.id, stage, error.reason)
            try:
                await self._everywhere(lambda peer, stage=stage: self._bring_forward(peer, decision, until=stage))
            except TasukiError as error:
                rank = error.metadata.get("node_rank", "")
                text = f"version {decision.policy_version} was decided, and not every node serves it: {error.message}"
                raise FleetEnded(text, node_rank=rank, cause=error.reason) from error

    async def bring_to_train(self) -> None:
        """Runs the stages towards TRAIN on all nodes; stragglers follow individually. Raises the error of a node after `patience_s`."""
        try:
            for stage in TO_TRAIN:
                if common_place(self.views) is _before(stage):
                    await self._run_everywhere(stage)
        except TasukiError as error:
            _log.warning("event=alone changeover=%s reason=%s", self.id, error.reason)
        if common_place(self.views) is not TRAIN:
            await self.go_back()

    async def go_back(self) -> None:
        """Brings every node to TRAIN individually. Raises the error of a node that does not arrive within `patience_s`."""
        await self._everywhere(self._bring_back)

    async def _take_back(self, cause: TasukiError) -> None:
        """Same as `go_back`, for a caller that raises `cause`: errors on the way are journalled and logged."""
        try:
            await self.go_back()
        except TasukiError as error:
            _log.error("event=undo_failed changeover=%s cause=%s reason=%s", self.id, cause.reason, error.reason)
            return
        for stage in reversed(self._finished):
            intent = self._journal.intend(stage, self.id, is_undo=True, trainer_boot_id="", rollout_boot_id="")
            self._tell(self._journal.done(intent, Outcome(), seconds=0.0))

    async def _run_everywhere(self, stage: Stage) -> list[StageAnswer]:
        """Runs a stage on all nodes at once and waits for all. Then raises the worst error."""
        intent, steps = self._journal.intend_everywhere(stage, self.id, num_nodes=len(self._peers))
        self._tell(StageEvent(self.id, stage, Status.STARTED, time=intent.time))
        started = time.perf_counter()

        async def run(peer: NodePeer, step: StepIntent) -> tuple[StageAnswer | None, StepResult]:
            answer, result = await _timed(step, peer.run_stage(stage, self._request_id(step)))
            return answer, replace(result, view=None if answer is None else answer.view)

        with self.trace.stage(intent) as span:
            ran = await asyncio.gather(*map(run, self._peers, steps))
            results = [result for _, result in ran]
            self._note(results)
            errors = [(result.intent.rank, result.error) for result in results if result.error is not None]
            seconds = time.perf_counter() - started
            if errors:
                error = worst(errors)
                self._report(intent, self._journal.failed(intent, error, seconds=seconds))
                raise error
            answers = [answer for answer, _ in ran if answer is not None]
            num_bytes = sum(answer.num_bytes for answer in answers)
            span.set("tasuki.bytes", num_bytes)
        version = answers[0].sums.policy_version if answers[0].sums is not None else None
        self._finished.append(stage)
        self._report(intent, self._journal.done(intent, Outcome(num_bytes, policy_version=version), seconds=seconds))
        return answers

    def _report(self, intent: Intent, event: StageEvent) -> None:
        _log.info(
            "event=stage changeover=%s stage=%s status=%s seconds=%.4f reason=%s",
            self.id,
            intent.stage,
            event.status,
            event.seconds,
            event.error_reason or "-",
        )
        self._tell(event)

    async def _everywhere(self, act: Callable[[NodePeer], Awaitable[None]]) -> None:
        """Calls `act` for every node at once and waits for all. Then raises the worst error."""
        outcomes = await asyncio.gather(*map(act, self._peers), return_exceptions=True)
        errors: list[tuple[int, TasukiError]] = []
        for peer, outcome in zip(self._peers, outcomes, strict=True):
            if isinstance(outcome, TasukiError):
                errors.append((peer.rank, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
        if errors:
            raise worst(errors)

    async def _bring_forward(self, peer: NodePeer, decision: Decision, *, until: Stage) -> None:
        async def act(view: NodeView) -> bool:
            following = step_forward(view, decision, until=until)
            if following is None:
                return True
            if isinstance(following, Stage):
                await self._step(peer, following, lambda name: _viewed(peer.run_stage(following, name)))
            else:
                await self._step(peer, following, peer.acquire_train)
            return False

        await self._until(peer, act)

    async def _bring_back(self, peer: NodePeer) -> None:
        async def act(view: NodeView) -> bool:
            if view.at is TRAIN:
                return True
            await self._step(peer, Step.ACQUIRE_TRAIN, peer.acquire_train)
            return False

        await self._until(peer, act)

    async def _until(self, peer: NodePeer, act: Callable[[NodeView], Awaitable[bool]]) -> None:
        """Reads a node's state and acts until `act` returns True. Raises the last error after `patience_s`."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._patience_s
        while True:
            try:
                if await act(await self._step(peer, Step.LOOK, lambda _: peer.look())):
                    return
                if clock() > ends:
                    raise DeadlineExceeded(f"the node has not arrived after {self._patience_s:g} s")
            except TasukiError as error:
                if isinstance(error, _HOPELESS) or clock() > ends:
                    raise
                _log.warning("event=miss changeover=%s node_rank=%d reason=%s", self.id, peer.rank, error.reason)
                await asyncio.sleep(_PAUSE_S)

    async def _step(self, peer: NodePeer, step: Stage | Step, ask: Callable[[str], Awaitable[NodeView]]) -> NodeView:
        (intent,) = self._journal.begin_steps(step, self.id, ranks=[peer.rank])
        with self.trace.around():
            view, result = await _timed(intent, ask(self._request_id(intent)))
        self._note([replace(result, view=view)])
        if result.error is not None:
            raise result.error
        assert view is not None
        return view

    def _note(self, results: Sequence[StepResult]) -> None:
        self._journal.end_steps(results)
        for result in results:
            rank = result.intent.rank
            self.views[rank] = result.view if result.view is not None else replace(self.views[rank], at=None)

    def _request_id(self, step: StepIntent) -> str:
        return f"fleet-{self._journal.epoch}-{step.id}"


async def _timed(step: StepIntent, asked: Awaitable[_Answer]) -> tuple[_Answer | None, StepResult]:
    """The answer, or None after an error, and the result without a view."""
    started = time.perf_counter()
    try:
        answer = await asked
    except TasukiError as error:
        return None, StepResult(step, time.perf_counter() - started, error=error)
    return answer, StepResult(step, time.perf_counter() - started)


async def _viewed(asked: Awaitable[StageAnswer]) -> NodeView:
    return (await asked).view


def _before(stage: Stage) -> Stage:
    ring = (TRAIN, *PREPARE, *COMMIT, *TO_TRAIN)
    return ring[ring.index(stage, 1) - 1]
