"""One changeover: intent, act, result for each stage; when one fails, the finished ones are taken back."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.peers import Observed, Peers
from tasuki.coordinator.phases import RULES, Phase, Service, Stage, advance, path, since_phase, turns_back, undo_path
from tasuki.coordinator.records import Intent, Outcome, StageEvent, Status
from tasuki.wire.errors import DeadlineExceeded, InternalError, PeerUnavailable, StageOrder, TasukiError

_log = logging.getLogger("tasuki.coordinator")
# After these nobody knows whether the stage was carried out, or still is. It is not sent again, but its undo is sent: a service
# takes one command at a time, in their order, so the undo finds the stage finished, or is refused because it never began.
_OUTCOME_UNKNOWN = (DeadlineExceeded, InternalError, PeerUnavailable)

Tell = Callable[[StageEvent, Stage], None]
"""Takes what happened, and where the node stands after it."""
Restart = Callable[[Service, str], None]
"""Has a service that hangs killed and started anew; takes the cause."""


class Changeover:
    """Runs the stages of one hand-over. `at` is where the node stands."""

    def __init__(
        self, changeover_id: str, *, seen: Observed, journal: Journal, peers: Peers, tell: Tell, restart: Restart
    ) -> None:
        self.id = changeover_id
        self.started = time.perf_counter()
        self._journal, self._peers, self._tell, self._restart = journal, peers, tell, restart
        self.stands(seen)

    def stands(self, seen: Observed) -> None:
        """Takes what the services say as the truth. Raises StageOrder when they do not fit together."""
        self.at = seen.place()
        self._is_on_the_way_back = seen.is_on_the_way_back
        self._boots = {"trainer_boot_id": seen.trainer_boot_id, "rollout_boot_id": seen.rollout_boot_id}

    async def bring_to(self, target: Phase) -> None:
        """Brings the node to `target`. When a stage fails, the finished ones are taken back and the stage's error is raised."""
        if self._is_on_the_way_back or turns_back(self.at, target) or self._lacks_publication(target):
            await self._take_back(since_phase(self.at))
        for stage in path(self.at, target):
            finished = since_phase(self.at)
            try:
                await self.run(stage)
            except TasukiError as error:
                if isinstance(error, DeadlineExceeded):
                    self._restart(RULES[stage].service, f"{stage} did not end in time: {error.message}")
                suspect = (stage,) if isinstance(error, _OUTCOME_UNKNOWN) else ()
                await self._take_back_after(error, (*finished, *suspect))
                raise

    def _lacks_publication(self, target: Phase) -> bool:
        """Whether SYNC is ahead, and the answer of the LOAD_WEIGHTS behind it was lost."""
        ahead = path(self.at, target)
        return Stage.SYNC in ahead and Stage.LOAD_WEIGHTS not in ahead and not self._journal.published().answer

    async def make_room(self) -> None:
        """Has the trainer leave the GPUs, so that an engine can start there: takes LOAD_TRAINER back. Raises GradientsPending."""
        await self._take_back((Stage.LOAD_TRAINER, *since_phase(self.at)))

    async def run(self, stage: Stage) -> None:
        """Carries one stage out. Raises its error, and StageOrder when another stage must come first."""
        after = advance(self.at, stage)
        intent = self._journal.intend(stage, self.id, is_undo=False, **self._boots)
        self._tell(StageEvent(self.id, stage, Status.STARTED, time=intent.time), self.at)
        published = self._journal.published() if stage is Stage.SYNC else Outcome()
        await self._journalled(intent, self._peers.run(intent, published=published.answer), after)

    async def _take_back(self, stages: Sequence[Stage]) -> None:
        """Undoes `stages`, which stand in the order in which they were run, and asks the services where that led."""
        for stage in undo_path(stages):
            intent = self._journal.intend(stage, self.id, is_undo=True, **self._boots)
            try:
                await self._journalled(intent, self._peers.undo(intent), self.at)
            except StageOrder:
                # The stage was never carried out; or rollout went on after it was seen, and the trainer must not return beside it.
                if stage is Stage.RESUME_WEIGHTS and not (await self._peers.observe()).is_asleep:
                    raise
        self.stands(await self._peers.observe())

    async def _take_back_after(self, cause: TasukiError, stages: Sequence[Stage]) -> None:
        """As _take_back, for a caller that raises `cause`: an error of the undo itself is journalled and logged."""
        try:
            await self._take_back(stages)
        except TasukiError as error:
            _log.error("event=undo_failed changeover=%s cause=%s reason=%s", self.id, cause.reason, error.reason)

    async def _journalled(self, intent: Intent, act: Awaitable[Outcome], leads_to: Stage) -> None:
        started = time.perf_counter()
        try:
            outcome = await act
        except TasukiError as error:
            self._report(self._journal.failed(intent, error, seconds=time.perf_counter() - started))
            raise
        self.at = leads_to
        self._report(self._journal.done(intent, outcome, seconds=time.perf_counter() - started))

    def _report(self, event: StageEvent) -> None:
        _log.info(
            "event=stage changeover=%s stage=%s status=%s seconds=%.4f bytes=%d reason=%s",
            event.changeover_id,
            event.stage,
            event.status,
            event.seconds,
            event.num_bytes,
            event.error_reason or "-",
        )
        self._tell(event, self.at)
