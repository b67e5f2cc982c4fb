"""What a journal tells of the services: the stages that each may have completed last, and the versions that they hold. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasuki.coordinator.audit.history import Invariant, StageRecord
from tasuki.wire.stages import RING, RULES, Rpc, Service, Stage, allowed_after, stages_of

_At = Stage | None
"""Last stage that a service reports as completed; None: freshly started."""


_Moves = Mapping[_At, _At]
"""Stage that a command leads to, by each stage at which it is accepted."""


def _runs(stage: Stage) -> _Moves:
    """Moves of a stage. A poisoned rollout releases memory from any stage."""
    rule = RULES[stage]
    gives_up = rule.service is Service.ROLLOUT and rule.rpc is Rpc.PAUSE
    return {at: stage for at in (None, *stages_of(rule.service)) if gives_up or stage in allowed_after(rule.service, at)}


_RUNS = {stage: _runs(stage) for stage in Stage}
_WITHDRAWN: _Moves = {None: None, Stage.LOAD_WEIGHTS: Stage.LOAD_TRAINER, Stage.LOAD_TRAINER: Stage.LOAD_TRAINER}
_UNDOS = {rule.stage: _RUNS[rule.undo] if isinstance(rule.undo, Stage) else _WITHDRAWN for rule in RING if rule.undo_command}


def moves_of(intent: StageRecord) -> _Moves:
    """Moves of an intent's command; none for the undo of SYNC or PAUSE_KV, which are undone with another stage."""
    return _UNDOS.get(intent.stage, {}) if intent.is_undo else _RUNS[intent.stage]


@dataclass(slots=True)
class PossibleStages:
    """One service, as far as the journal shows."""

    boot_id: str = ""
    is_absent: bool = False
    """Whether it was silent at the coordinator's last look, which then says nothing about it."""
    at: set[_At] = field(default_factory=lambda: {None})
    at_if_new: set[_At] = field(default_factory=lambda: {None})
    """Possible stages if it restarted since its boot id was last observed."""
    unknown: list[_Moves] = field(default_factory=list)
    """Commands without an answer, which may run until the service answers a later one."""

    def may_be(self) -> set[_At]:
        stages = set(self.at)
        for moves in self.unknown:
            stages |= _moved(stages, moves)
        return stages

    def seen(self, boot_id: str) -> None:
        """Records an observed boot id; empty if the service was silent and counts as freshly started."""
        self.is_absent = not boot_id
        if not boot_id:
            self.at = self.may_be() | self.at_if_new
        elif boot_id != self.boot_id:
            self.at = self.at | self.at_if_new if not self.boot_id else set(self.at_if_new)
            self.boot_id, self.unknown = boot_id, []
            self.at_if_new = {None}

    def carried_out(self, moves: _Moves) -> bool:
        """Records that the service reported success. Returns False if that is impossible."""
        if not moves:
            return True
        self.at = _moved(self.may_be(), moves)
        self.at_if_new = _moved(self.at_if_new, moves) | {None}
        self.unknown = []
        return bool(self.at)

    def refused(self, moves: _Moves, *, is_out_of_order: bool) -> None:
        """Records that the service reported a refusal; earlier commands have ended.

        is_out_of_order: the command did not fit the service's stage: it restarted, unless a possible stage explains it.
        """
        if not moves:
            return
        self.at, self.unknown = self.may_be(), []
        if is_out_of_order:
            self.at = {at for at in self.at if at not in moves} or self.at | self.at_if_new

    def not_heard(self, moves: _Moves) -> None:
        """Records a lost answer: the command may have run, or may still run."""
        self.unknown.append(moves)
        self.at_if_new = self.at_if_new | _moved(self.at_if_new, moves)


def _moved(stages: set[_At], moves: _Moves) -> set[_At]:
    return {moves[at] for at in stages if at in moves}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights held by one life of a service. boot_id: of that life. version: None if its answer was lost."""

    boot_id: str
    version: int | None
    epoch: int


@dataclass(slots=True)
class WeightsTrace:
    """Path of the weights from trainer to rollout. Methods may raise Violation."""

    num_rewinds: int = 0
    versions: set[int] = field(default_factory=set)
    """All that were served."""
    held: _Weights | None = None
    """What rollout holds."""
    _published: _Weights | None = None
    _last: _Weights | None = None
    """Latest publication with a version, even if withdrawn since."""
    _served: dict[str, int] = field(default_factory=dict)
    """Latest version by rollout's boot id."""

    def carried_out(self, intent: StageRecord) -> None:
        match (intent.stage, intent.is_undo):
            case (Stage.LOAD_WEIGHTS, False):
                self._publish(intent)
            case (Stage.LOAD_WEIGHTS, True) | (Stage.LOAD_TRAINER, False):
                self._published = None
            case (Stage.OFFLOAD, True) if not intent.is_settled:
                self._published = None
            case (Stage.SYNC, False):
                self._receive(intent)
            case (Stage.PAUSE_WEIGHTS, False) | (Stage.RESUME_WEIGHTS, True):
                self.held = None
            case (Stage.RESUME_KV, False) | (Stage.DRAIN, True):
                self._serve(intent)

    def not_heard(self, intent: StageRecord) -> None:
        """Handles a lost answer: the stage may or may not have run."""
        if intent.stage is Stage.SYNC and not intent.is_undo and self._published is not None:
            self.held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _publish(self, intent: StageRecord) -> None:
        weights, last = _Weights(intent.boot_ids[Service.TRAINER], intent.policy_version, intent.epoch), self._last
        if weights.version is not None and last is not None and last.version is not None and weights.version < last.version:
            if weights.boot_id == last.boot_id or weights.epoch == last.epoch:
                expected = f"version {last.version} or a later one published, found {weights.version}"
                raise intent.breaks(Invariant.VERSIONS_GROW, expected)
            self.num_rewinds += 1
        self._published = weights
        if weights.version is not None:
            self._last = weights

    def _receive(self, intent: StageRecord) -> None:
        boot_id, version = intent.boot_ids[Service.TRAINER], intent.policy_version
        if self._published is None or self._published.boot_id != boot_id:
            expected = f"LOAD_WEIGHTS of the trainer with boot id {boot_id or 'unknown'} before it"
            raise intent.breaks(Invariant.SYNC, expected)
        if version is not None and version != self._published.version:
            expected = f"version {self._published.version}, which is published, found {version}"
            raise intent.breaks(Invariant.SYNC, expected)
        self.held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _serve(self, intent: StageRecord) -> None:
        boot_id = intent.boot_ids[Service.ROLLOUT]
        if self.held is None or self.held.boot_id != boot_id:
            expected = f"SYNC into the rollout with boot id {boot_id or 'unknown'} before it"
            raise intent.breaks(Invariant.SERVED, expected)
        if (version := self.held.version) is None:
            return
        if version < self._served.get(boot_id, 0):
            expected = f"version {self._served[boot_id]} or a later one, found {version}"
            raise intent.breaks(Invariant.VERSIONS_GROW, expected)
        self._served[boot_id] = version
        self.versions.add(version)
