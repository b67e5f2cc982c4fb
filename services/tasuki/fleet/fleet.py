"""The coordinator of all nodes as one: offers a node coordinator's operations and runs each on every node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from tasuki.coordinator.attempts import next_attempt_id
from tasuki.coordinator.changeover_trace import ChangeoverTrace
from tasuki.coordinator.journal_recovery import close_interrupted
from tasuki.coordinator.operations import LOSSES, Operation, Operations
from tasuki.coordinator.phases import advance, leads_to, phase_of
from tasuki.coordinator.records import NodeState, StageEvent, Status
from tasuki.fleet.changeover import FleetChangeover
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.node_peer import NodePeer
from tasuki.fleet.records import Decision, NodeView
from tasuki.fleet.rules import TRAIN, common_place, serves, worst
from tasuki.memory.stages import Phase, Stage
from tasuki.wire.errors import FleetEnded, Interrupted, NotJoined, PeerUnavailable, StageOrder, TasukiError
from tasuki.wire.tracing import NO_TRACER, Tracer

_log = logging.getLogger("tasuki.fleet")
_POLL_S = 0.2
_MAX_TRIES = 5
_LOSSES = (*LOSSES, Interrupted, StageOrder)
"""Errors as of a node's coordinator, plus those of a node that moved by itself, for example by restarting."""


class Fleet:
    """Runs one operation at a time. Create it inside the event loop, after the journal's epoch has begun."""

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
        self._journal, self._peers, self._tracer = journal, peers, tracer
        self._boot_id, self._target, self._patience_s, self._end = boot_id, target, patience_s, end
        self._views = [NodeView(peer.rank, None) for peer in peers]
        self._is_known = False
        self._policy_version = self._served()
        self._open: FleetChangeover | None = None
        self._operations = Operations(journal, state=self.state)
        self.watchers = self._operations.watchers
        self._num_done = journal.num_done()
        self._last_error, self._missed = close_interrupted(journal), ""

    @property
    def views(self) -> list[NodeView]:
        """The nodes' last reported states, by rank."""
        return list(self._views if self._open is None else self._open.views)

    def state(self) -> NodeState:
        return NodeState(
            at=common_place(self.views),
            epoch=self._journal.epoch,
            policy_version=self._policy_version,
            boot_id=self._boot_id,
            changeover_id=self._open.id if self._open else "",
            trainer_target=self._target,
            rollout_target=self._target,
            num_changeovers=self._num_done,
            last_error=self._missed or self._last_error,
        )

    async def look(self) -> NodeState:
        """Returns the state after running work has finished and every node was read. Raises the error of a node that does not answer."""
        async with self._operations.turn():
            await self._look()
            return self.state()

    def acquire(self, phase: Phase, request_id: str) -> Operation:
        """Returns the operation that brings all nodes to `phase`: one begun with this request id, the running one, or a new one.

        Raises ChangeoverRunning if a different one is running.
        """
        subject = f"phase {phase}"
        self._operations.join(subject, request_id)
        known = self._operations.find(subject, request_id)
        if known is not None:
            return known
        return self._operations.add(request_id, Operation(subject, asyncio.create_task(self._bring_to(phase, request_id))))

    def run_stage(self, stage: Stage, request_id: str) -> Operation:
        """Returns the operation that runs one stage on all nodes. Raises ChangeoverRunning if another one is running."""
        subject = f"stage {stage}"
        known = self._operations.find(subject, request_id)
        if known is not None:
            return known
        return self._operations.add(
            request_id, Operation(subject, asyncio.create_task(self._run_stage_alone(stage, request_id)))
        )

    async def recover(self) -> None:
        """Reads all nodes after they joined. Completes a pending decision; otherwise returns nodes from the middle of the ring to TRAIN."""
        while not self._is_known:
            try:
                async with self._operations.turn():
                    await self._look()
                    self._is_known = True
                    request_id = f"recovery-{self._journal.epoch}"
                    if self._pending() is None and phase_of(common_place(self._views) or Stage.SYNC) is None:
                        _log.warning("event=recover places=%s", ",".join(view.at or "-" for view in self._views))
                        await self._bring_to(Phase.TRAIN, request_id)
                    elif self._pending() is not None:
                        await self._bring_to(Phase.ROLLOUT, request_id)
                self._missed = ""
            except TasukiError as error:  # also of a journalled changeover
                self._tell_miss(error)
            await asyncio.sleep(0 if self._is_known else _POLL_S)

    def _tell_miss(self, error: TasukiError) -> None:
        """Logs once, and keeps the error in the state until all nodes have answered."""
        told = f"{error.reason}: {error.message}"
        if told != self._missed and not isinstance(error, NotJoined):
            _log.warning("event=recover_waits reason=%s message=%a", error.reason, error.message)
            self._missed = told

    async def stop(self) -> None:
        """Cancels the running operation; its steps stay in the journal without results."""
        await self._operations.stop()

    async def _bring_to(self, phase: Phase, request_id: str) -> None:
        """Retries, as a new changeover, if a node was unreachable on the way and is back."""
        async with self._operations.turn():
            await self._settle(request_id)
            for number in range(1, _MAX_TRIES + 1):
                await self._wait_ready()
                if self._holds(phase):
                    self._close_left(phase)
                    self._operations.tell(StageEvent("", None, Status.HELD, time=time.time()))
                    return
                self._close_left(phase)
                try:
                    await self._try(phase, request_id)
                except _LOSSES as error:
                    if number == _MAX_TRIES:
                        raise
                    _log.warning("event=try_again phase=%s number=%d reason=%s", phase, number + 1, error.reason)
                    await asyncio.sleep(_POLL_S * number)
                else:
                    return

    async def _settle(self, request_id: str) -> None:
        """Completes a decision left by an earlier life of the fleet or by a single stage, since it cannot be undone."""
        self._resolve_intents()
        if self._pending() is not None:
            await self._wait_ready()
            self._close_left(Phase.ROLLOUT)
            await self._try(Phase.ROLLOUT, f"{request_id}.forward")

    async def _try(self, phase: Phase, request_id: str) -> None:
        changeover = self._begin(next_attempt_id(self._journal, request_id), target=phase)
        try:
            await (changeover.bring_to_rollout() if phase is Phase.ROLLOUT else changeover.bring_to_train())
        except TasukiError as error:
            self._close(changeover, error)
            if isinstance(error, FleetEnded):
                self._end(error)
            raise
        self._close(changeover)

    async def _run_stage_alone(self, stage: Stage, request_id: str) -> None:
        """Runs one stage on all nodes, without undo. OFFLOAD is preceded by the decision."""
        async with self._operations.turn():
            self._resolve_intents()
            await self._look()
            at = common_place(self._views)
            if at is None:
                raise StageOrder("the nodes are at different places; acquire a phase", stage=stage)
            advance(at, stage)
            target = leads_to(at)
            if self._open is not None and self._open.target is not target:
                self._close_left(target)
            changeover = self._open
            if changeover is None:
                changeover = self._begin(next_attempt_id(self._journal, request_id), target=target)
            else:
                changeover.views = list(self._views)
                self._journal.note_views(changeover.id, self._views)
            await changeover.run(stage)
            self._views = list(changeover.views)
            if phase_of(stage) is not None:
                self._close(changeover)

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
                if clock() > ends or all(view.at is not None for view in self._views):
                    return
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        """Reads all nodes. Raises the worst error, after taking the views of the others."""
        seen = await asyncio.gather(*(peer.look() for peer in self._peers), return_exceptions=True)
        errors: list[tuple[int, TasukiError]] = []
        for rank, view in enumerate(seen):
            if isinstance(view, NodeView):
                self._views[rank] = view
            elif isinstance(view, TasukiError):
                self._views[rank] = NodeView(rank, None)
                errors.append((rank, view))
            else:
                raise view
        if self._open is not None:
            self._open.views = list(self._views)
        if errors:
            raise worst(errors)

    def _holds(self, phase: Phase) -> bool:
        if phase is Phase.TRAIN:
            return common_place(self._views) is TRAIN
        decision = self._journal.decision()
        return all(serves(view, decision) for view in self._views)

    def _served(self) -> int | None:
        decision = self._journal.decision()
        return None if decision is None else decision.policy_version

    def _pending(self) -> Decision | None:
        """A decision that not all nodes have completed."""
        decision = self._journal.decision()
        return None if decision is None or self._journal.is_carried_out(decision) else decision

    def _resolve_intents(self) -> None:
        """Resolves stages that an earlier life began on all nodes: their outcome is read from the nodes, not the journal."""
        for intent in self._journal.unresolved():
            self._journal.failed(intent, Interrupted(f"the fleet stopped before {intent.stage} was answered"), seconds=0.0)

    def _begin(self, request_id: str, *, target: Phase) -> FleetChangeover:
        origin = common_place(self._views) or next((view.at for view in self._views if view.at is not None), TRAIN)
        changeover_id = self._journal.begin_changeover(request_id, origin=origin, target=target)
        self._journal.note_views(changeover_id, self._views)
        self._open = FleetChangeover(
            changeover_id,
            target,
            views=self._views,
            journal=self._journal,
            peers=self._peers,
            tell=self._operations.tell,
            patience_s=self._patience_s,
            trace=ChangeoverTrace(self._tracer, changeover_id=changeover_id, target=target, request_id=request_id),
        )
        return self._open

    def _close_left(self, phase: Phase) -> None:
        """Ends a changeover begun by RunStage, before another one begins."""
        if self._open is not None:
            self._close(self._open, Interrupted(f"abandoned when phase {phase} was requested"))

    def _close(self, changeover: FleetChangeover, error: TasukiError | None = None) -> None:
        self._views = list(changeover.views)
        seconds = time.perf_counter() - changeover.started
        version = self._served() if error is None and changeover.target is Phase.ROLLOUT else None
        ended = self._journal.end_changeover(changeover.id, seconds=seconds, policy_version=version, error=error)
        changeover.trace.end(error)
        self._open = None
        self._num_done += error is None
        self._last_error = f"{error.reason}: {error.message}" if error else ""
        self._policy_version = self._policy_version if version is None else version
        self._operations.tell(ended.ending())
