"""Replays a journal against the ring of stages, and finds the first broken invariant. Pure: no I/O.

The journal holds the coordinator's commands and their answers. After a lost answer or a restart, a service may be at one of several
stages (`PossibleStages`); an entry that fits none of them is a breach.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tasuki.coordinator.history import (
    ChangeoverRecord,
    History,
    Invariant,
    PossibleStages,
    StageRecord,
    Violation,
    WeightsTrace,
    check_gaps,
    moves_of,
)
from tasuki.coordinator.journal_file import id_number, id_text
from tasuki.coordinator.phases import ring_position, since_phase, undo_path
from tasuki.wire.errors import DeadlineExceeded, InternalError, Interrupted, PeerUnavailable, StageOrder
from tasuki.wire.stages import HOLDS, NEXT, RULES, Phase, Service, Stage, StageStatus


@dataclass(slots=True)
class Audit:
    """Counts over a journal, up to the first violation, if any."""

    num_epochs: int = 0
    num_changeovers: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_undone: int = 0
    num_interrupted: int = 0
    num_stages: int = 0
    num_stages_done: int = 0
    num_stages_failed: int = 0
    num_stages_undone: int = 0
    num_unanswered: int = 0
    num_versions_served: int = 0
    num_rewinds: int = 0
    """Number of times training restarted, or went back to an older checkpoint."""
    violation: Violation | None = None


def audit(history: History) -> Audit:
    """Replays the history until its end or the first violation."""
    found = Audit(num_epochs=len(history.epochs))
    try:
        _check_results(history)
        replay = _Replay(history, found)
        replay.run()
        found.num_versions_served, found.num_rewinds = len(replay.weights.versions), replay.weights.num_rewinds
        check_gaps(history)
    except Violation as violation:
        found.violation = violation
    return found


def _check_results(history: History) -> None:
    for lost in history.lost_results:
        raise Violation(Invariant.ONE_RESULT, f"an intent for result {lost}")
    for number, stage in enumerate(history.stages):
        if number and history.stages[number - 1].id == stage.id:
            raise stage.breaks(Invariant.ONE_RESULT, "one result, found two")
        possible = (StageStatus.UNDONE if stage.is_undo else StageStatus.DONE, StageStatus.FAILED)
        is_failed = stage.status is StageStatus.FAILED
        if stage.status is not None and (stage.status not in possible or is_failed is not bool(stage.error_reason)):
            expected = f"{possible[0]}, or FAILED with a reason, found {stage.status} with reason {stage.error_reason!r}"
            raise stage.breaks(Invariant.ONE_RESULT, expected)
    for lost in history.lost_endings:
        raise Violation(Invariant.ONE_RESULT, "a changeover for this ending", lost)
    for number, changeover in enumerate(history.changeovers):
        if number and history.changeovers[number - 1].id == changeover.id:
            raise Violation(Invariant.ONE_RESULT, "one ending, found two", changeover.id)
        status, reason = changeover.status, changeover.error_reason
        if status not in (None, *((StageStatus.FAILED, StageStatus.UNDONE) if reason else (StageStatus.DONE,))):
            expected = f"DONE, or FAILED or UNDONE with a reason, found {status} with reason {reason!r}"
            raise Violation(Invariant.ONE_RESULT, expected, changeover.id)


_UNKNOWN = {error.reason for error in (DeadlineExceeded, InternalError, PeerUnavailable, Interrupted)}
"""Error reasons after which a command may still have run."""


@dataclass(slots=True)
class _Replay:
    history: History
    found: Audit
    services: dict[Service, PossibleStages] = field(default_factory=lambda: {service: PossibleStages() for service in Service})
    """Both services, the trainer first."""
    believed: Stage | None = None
    """Stage that the coordinator assumes; None after an undo, when it asks the services."""
    goal: Stage | None = None
    """Last stage of the changeover, which is undone if its result could not be written."""
    ways_back: list[tuple[Stage, ...]] = field(default_factory=list)
    """Stages that may be undone next, while undoing."""
    weights: WeightsTrace = field(default_factory=WeightsTrace)

    def run(self) -> None:
        self._check_numbers()
        self._check_order()
        for changeover, intents in self._changeovers():
            self._begin(changeover, intents)
            for intent in intents:
                self._intend(intent)
                self._conclude(intent)
            self._end(changeover)

    def _check_numbers(self) -> None:
        epoch, sequence = 0, 0
        for intent in self.history.stages:
            if intent.epoch not in self.history.epochs or intent.epoch < epoch:
                raise intent.breaks(Invariant.NUMBERS_GROW, f"an epoch that was begun, and none below {epoch}")
            if intent.epoch == epoch and intent.sequence <= sequence:
                raise intent.breaks(Invariant.NUMBERS_GROW, f"a sequence above {sequence}")
            epoch, sequence = intent.epoch, intent.sequence
        epoch = 0
        for changeover in self.history.changeovers:
            if changeover.epoch not in self.history.epochs or changeover.epoch < epoch:
                expected = f"an epoch that was begun, and none below {epoch}, found {changeover.epoch}"
                raise changeover.breaks(Invariant.NUMBERS_GROW, expected)
            epoch = changeover.epoch

    def _check_order(self) -> None:
        last, begun = 0, {changeover.id for changeover in self.history.changeovers}
        for intent in self.history.stages:
            number = id_number(intent.changeover_id)
            if intent.changeover_id not in begun or number < last:
                raise intent.breaks(Invariant.ONE_OPEN, f"a changeover that was begun, none before {id_text(last)}")
            last = number
        for intent in self.history.stages[:-1]:
            if intent.status is None:
                raise intent.breaks(Invariant.SETTLED, "a result, since another intent follows")

    def _changeovers(self) -> Iterator[tuple[ChangeoverRecord, list[StageRecord]]]:
        """Yields each changeover with its intents; it is over when the next one begins. Raises Violation."""
        intents = list(self.history.stages)
        for number, changeover in enumerate(self.history.changeovers, start=1):
            own: list[StageRecord] = []
            while intents and intents[0].changeover_id == changeover.id:
                own.append(intents.pop(0))
            for intent in own:
                if intent.epoch != changeover.epoch:
                    expected = f"epoch {changeover.epoch}, in which the changeover began"
                    raise intent.breaks(Invariant.ONE_OPEN, expected)
            yield changeover, own
            if number < len(self.history.changeovers) and changeover.status is None:
                expected = f"an ending, since {self.history.changeovers[number].id} began after it"
                raise changeover.breaks(Invariant.ONE_OPEN, expected)

    def _begin(self, changeover: ChangeoverRecord, intents: Sequence[StageRecord]) -> None:
        self.found.num_changeovers += 1
        self.ways_back = []
        for service, possible in self.services.items():
            if intents:
                possible.seen(intents[0].boot_ids[service])
        self.goal = HOLDS[changeover.target]
        if not self._narrow(changeover.origin, or_new=not intents):
            expected = f"origin {_names(self._places(or_new=not intents))}, found {changeover.origin}"
            raise changeover.breaks(Invariant.ORIGIN, expected)
        self.believed = changeover.origin
        if intents:
            for possible in self.services.values():
                possible.at_if_new = {None}  # the same boot id was observed later: it had not restarted

    def _intend(self, intent: StageRecord) -> None:
        self.found.num_stages += 1
        for service, possible in self.services.items():
            possible.seen(intent.boot_ids[service])
        self._check_holder(intent)
        if intent.is_undo:
            self._check_undo(intent)
            self.believed = None
            return
        self.ways_back = []
        after = RULES[intent.stage].after
        if not self._narrow(after) and after is not self.believed:
            allowed = sorted({NEXT[at] for at in self._places()})
            raise intent.breaks(Invariant.RING, f"{_names(allowed)}, since the node is at {_names(self._places())}")

    def _check_holder(self, intent: StageRecord) -> None:
        trainer, rollout = (possible.may_be() for possible in self.services.values())
        if intent.stage is Stage.RESUME_KV and not intent.is_undo and Stage.OFFLOAD not in trainer:
            raise intent.breaks(Invariant.ONE_HOLDER, f"the trainer at OFFLOAD, it is at {_names(trainer)}")
        takes_back = intent.stage is (Stage.OFFLOAD if intent.is_undo else Stage.LOAD_TRAINER)
        if takes_back and not {None, Stage.PAUSE_WEIGHTS} & rollout:
            raise intent.breaks(Invariant.ONE_HOLDER, f"rollout asleep, it is at {_names(rollout)}")

    def _check_undo(self, intent: StageRecord) -> None:
        if not self.ways_back:
            for at in {*self._places(), *((self.believed,) if self.believed else ())}:
                done = since_phase(at)
                begun = [(*done, NEXT[at]), done, (Stage.LOAD_TRAINER, *done)]
                if at is self.goal:
                    begun.append((*since_phase(RULES[at].after), at))
                self.ways_back += [undo_path(stages) for stages in begun]
        expected = sorted({way[0] for way in self.ways_back if way})
        self.ways_back = [way[1:] for way in self.ways_back if way and way[0] is intent.stage]
        if not self.ways_back:
            raise intent.breaks(Invariant.UNDO, f"the undo of {_names(expected)}")

    def _conclude(self, intent: StageRecord) -> None:
        possible, moves = self.services[RULES[intent.stage].service], moves_of(intent)
        if intent.status is None:
            self.found.num_unanswered += 1
            possible.not_heard(moves)
        elif intent.status is StageStatus.FAILED:
            self.found.num_stages_failed += 1
            if intent.error_reason in _UNKNOWN:
                possible.not_heard(moves)
                self.weights.not_heard(intent)
            else:
                possible.refused(moves, is_out_of_order=intent.error_reason == StageOrder.reason)
        else:
            self.found.num_stages_undone += intent.is_undo
            self.found.num_stages_done += not intent.is_undo
            at = possible.may_be()
            if intent.is_settled and intent.is_undo:
                # The stage has left nothing behind: its undo ran, or there was nothing to undo.
                possible.not_heard(moves)
            elif not possible.carried_out(moves) and not possible.at_if_new - {None}:
                raise intent.breaks(Invariant.RING, f"a refusal, since the service is at {_names(at)}")
            self.believed = None if intent.is_undo else intent.stage
            self.weights.carried_out(intent)

    def _end(self, changeover: ChangeoverRecord) -> None:
        self.found.num_done += changeover.status is StageStatus.DONE
        self.found.num_failed += changeover.status is StageStatus.FAILED
        self.found.num_undone += changeover.status is StageStatus.UNDONE
        self.found.num_interrupted += changeover.status is StageStatus.FAILED and changeover.error_reason == Interrupted.reason
        if changeover.status is not StageStatus.DONE:
            return
        places = self._places(or_new=True)
        if HOLDS[changeover.target] not in places:
            expected = f"the node at {HOLDS[changeover.target]}, it is at {_names(places)}"
            raise changeover.breaks(Invariant.TARGET, expected)
        held = self.weights.held
        served = None if held is None else held.version
        if changeover.target is Phase.ROLLOUT and served is not None and changeover.policy_version != served:
            expected = f"version {served} as the one that is served, found {changeover.policy_version}"
            raise changeover.breaks(Invariant.TARGET, expected)

    def _places(self, *, or_new: bool = False) -> set[Stage]:
        """Stages that the node may be at. or_new: includes a restart that the journal does not show yet."""
        return {at for _, at in self._positions(or_new=or_new)}

    def _narrow(self, at: Stage, *, or_new: bool = False) -> bool:
        """Narrows the possible stages to those with the node at `at`. Returns False if there are none.

        or_new: no boot ids were recorded, so a service that counted as freshly started may have been silent instead, and unmoved.
        """
        fitting = [pair for pair, place in self._positions(or_new=or_new) if place is at]
        for index, possible in enumerate(self.services.values()):
            places = {pair[index] for pair in fitting}
            may_be_absent = possible.is_absent or (or_new and None in places)
            if fitting and not may_be_absent:
                possible.at = places
        return bool(fitting)

    def _positions(self, *, or_new: bool) -> Iterator[tuple[tuple[Stage | None, Stage | None], Stage]]:
        trainers, rollouts = (one.may_be() | (one.at_if_new if or_new else set()) for one in self.services.values())
        for trainer in trainers:
            for rollout in rollouts:
                place = ring_position(trainer=trainer, rollout=rollout)
                if place is not None:
                    yield (trainer, rollout), place


def _names(stages: Sequence[Stage | None] | set[Stage] | set[Stage | None]) -> str:
    return " or ".join(sorted(stage or "a fresh start" for stage in stages)) or "nowhere"
