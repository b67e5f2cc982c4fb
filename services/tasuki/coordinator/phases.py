"""Ring of stages: a node's position by what its services report, the next stage, and the way back. Pure: no I/O, no proto.

A node is *at* the stage it completed last: at LOAD_TRAINER it is in phase TRAIN, at RESUME_KV in phase ROLLOUT,
elsewhere in the middle of a changeover. The rows of the ring are in wire/stages.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.wire.errors import PeerUnavailable, StageOrder
from tasuki.wire.stages import NEXT, RULES, Phase, Service, Stage, last_of


def phase_of(at: Stage) -> Phase | None:
    """Phase that holds at `at`; None in the middle of a changeover."""
    return RULES[at].completes


def advance(at: Stage, stage: Stage) -> Stage:
    """Position of the node after `stage`. Raises StageOrder if another stage must come first."""
    if RULES[stage].after is not at:
        raise StageOrder(
            f"{stage} cannot come after {at}; the next stage is {NEXT[at]}", stage=stage, after=at, allowed=NEXT[at]
        )
    return stage


def path(at: Stage, to: Phase) -> tuple[Stage, ...]:
    """Stages that lead forwards from `at` to phase `to`; none if it already holds."""
    stages: list[Stage] = []
    while phase_of(at) is not to:
        at = NEXT[at]
        stages.append(at)
    return tuple(stages)


def leads_to(at: Stage) -> Phase:
    """Next phase, going forwards."""
    at = NEXT[at]
    while (phase := phase_of(at)) is None:
        at = NEXT[at]
    return phase


def since_phase(at: Stage) -> tuple[Stage, ...]:
    """Stages completed since a phase last held, in order; none while one holds."""
    stages: list[Stage] = []
    while phase_of(at) is None:
        stages.insert(0, at)
        at = RULES[at].after
    return tuple(stages)


def undo_path(finished: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages of `finished` in the order they are undone; none if one of them has no undo.

    Newest first, rollout's before the trainer's: rollout releases its memory before the trainer takes its own. Every state on the way
    back has a place in the ring (`ring_position`), even if the coordinator dies in the middle.
    """
    if not all(RULES[stage].has_undo for stage in finished):
        return ()
    newest_first = finished[::-1]
    return tuple(sorted(newest_first, key=lambda stage: RULES[stage].service is Service.TRAINER))


def turns_back(at: Stage, to: Phase) -> bool:
    """Whether undoing leads from `at` to phase `to`: it held last, and every stage since has an undo."""
    stages = since_phase(at)
    return bool(undo_path(stages)) and phase_of(RULES[stages[0]].after) is to


def ring_position(*, trainer: Stage | None, rollout: Stage | None) -> Stage | None:
    """Position of the node, from the last stage that each service reports as completed (None: freshly started).

    A restarted rollout is asleep, which is compatible with any position of the trainer. A restarted trainer is loaded, so the node is
    where rollout is: it goes on to LOAD_TRAINER, or back (`lost_weights`). None if the two contradict each other.
    """
    is_alone = trainer is None and rollout not in (None, Stage.PAUSE_WEIGHTS)
    if is_alone or lost_weights(trainer=trainer, rollout=rollout):
        return rollout
    return _RING_POSITIONS.get((trainer or Stage.LOAD_TRAINER, rollout or Stage.PAUSE_WEIGHTS))


def lost_weights(*, trainer: Stage | None, rollout: Stage | None) -> bool:
    """Whether rollout waits for weights that are no longer published, so the node can only go back.

    The trainer was restarted, or withdrew them and perhaps released its memory, while rollout did not answer.
    """
    if trainer is Stage.OFFLOAD:
        return rollout is Stage.RESUME_WEIGHTS
    return trainer in (None, Stage.LOAD_TRAINER) and rollout in (Stage.RESUME_WEIGHTS, Stage.SYNC)


_RING_POSITIONS = {(last_of(Service.TRAINER, at), last_of(Service.ROLLOUT, at)): at for at in RULES}


@dataclass(frozen=True, slots=True)
class Observed:
    """State that both services report."""

    trainer_boot_id: str
    rollout_boot_id: str
    trainer_stage: Stage | None
    rollout_stage: Stage | None
    trainer_version: int | None = None
    served_version: int | None = None
    received_version: int | None = None
    """Version of the weights that rollout holds but does not serve yet."""
    poison: str = ""
    absent: tuple[Service, ...] = ()
    """Services that do not answer. They count as freshly started, as they will be."""
    in_stage: tuple[Service, ...] = ()
    """Services that still run a command of an earlier coordinator: their stage is not yet known."""

    def require_all(self) -> None:
        """Raises PeerUnavailable naming a service that does not answer or still runs a stage."""
        for service in self.absent:
            raise PeerUnavailable(f"{service} does not answer", peer=service)
        for service in self.in_stage:
            raise PeerUnavailable(f"{service} still carries out a stage that was cut off; try again", peer=service)

    @property
    def is_asleep(self) -> bool:
        """Whether rollout reports that it holds no memory."""
        return Service.ROLLOUT not in self.absent and self.rollout_stage in (None, Stage.PAUSE_WEIGHTS)

    def restarted_since(self, before: "Observed") -> Service | None:
        """Service that is gone or was restarted since `before`; None if neither."""
        if self.trainer_boot_id != before.trainer_boot_id:
            return Service.TRAINER
        return Service.ROLLOUT if self.rollout_boot_id != before.rollout_boot_id else None

    @property
    def is_on_the_way_back(self) -> bool:
        """Whether the node can only go back: the publication is gone, or the trainer has trained since."""
        versions = {self.trainer_version, self.received_version} - {None}
        is_stale = self.rollout_stage is Stage.SYNC and len(versions) > 1
        return is_stale or lost_weights(trainer=self.trainer_stage, rollout=self.rollout_stage)

    def lacks(self, phase: Phase) -> Service | None:
        """Service that must come back before any step towards `phase`; None if none is missing.

        An engine takes its memory while the trainer is off the GPUs: the trainer leaves before it starts, and returns after it.
        A missing trainer is not waited for while rollout is awake, since it may need rollout's memory to start.
        """
        if Service.ROLLOUT in self.absent and (phase is Phase.ROLLOUT or self.trainer_stage is Stage.OFFLOAD):
            return None if self.trainer_is_in_the_way else Service.ROLLOUT
        if Service.TRAINER in self.absent and self.rollout_stage in (None, Stage.PAUSE_WEIGHTS):
            return Service.TRAINER
        return Service.ROLLOUT if self.poison and phase is Phase.ROLLOUT else None

    @property
    def trainer_is_in_the_way(self) -> bool:
        """Whether the trainer is on the GPUs that a starting engine needs."""
        is_resident = self.trainer_stage in (None, Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS)
        return Service.ROLLOUT in self.absent and Service.TRAINER not in self.absent and is_resident

    def place(self) -> Stage:
        """Stage that the node is at. Raises StageOrder if the two services contradict each other."""
        trainer, rollout = self.trainer_stage, self.rollout_stage
        if (at := ring_position(trainer=trainer, rollout=rollout)) is None:
            text = f"trainer is at {trainer} and rollout at {rollout}, where no changeover leads; restart the node"
            raise StageOrder(text, trainer=trainer, rollout=rollout)
        return at
