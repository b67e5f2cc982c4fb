"""The coordinator of all nodes as one: offers a node coordinator's operations and runs each on every node."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from tasuki.coordinator.changeover import ChangeoverTrace
from tasuki.coordinator.journal import ending
from tasuki.coordinator.operations import LOSSES, Operated, Operation, attempt_ids, held_event
from tasuki.coordinator.phases import phase_of
from tasuki.fleet.changeover import FleetChangeover
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.nodes import NodePeer
from tasuki.fleet.rules import TRAIN, common_place, errors_of, place, serves, worst
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.wire.errors import FleetEnded, Interrupted, NotJoined, PeerUnavailable, PermissionDenied, StageOrder, TasukiError
from tasuki.wire.stages import Phase, Stage
from tasuki.wire.tracing import NO_TRACER, Tracer

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
