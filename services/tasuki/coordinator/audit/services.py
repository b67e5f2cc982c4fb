"""What a journal tells of the services: the stages that each may have completed last, and the versions that they hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.coordinator.audit.history import Broken, Invariant, StageRecord
from tasuki.wire.stages import RING, RULES, Rpc, Service, Stage, allowed_after, stages_of

_At = Stage | None
"""Last stage that a service reports as completed; None: freshly started."""


def _accepted_after(stage: Stage) -> list[_At]:
    """Stages at which a service accepts the command. A poisoned rollout releases memory from any stage."""
    rule = RULES[stage]
    gives_up = rule.service is Service.ROLLOUT and rule.rpc is Rpc.PAUSE
    return [at for at in (None, *stages_of(rule.service)) if gives_up or stage in allowed_after(rule.service, at)]


_RUNS: dict[Stage, dict[_At, _At]] = {stage: dict.fromkeys(_accepted_after(stage), stage) for stage in Stage}
"""Stage that a command leads to, by each stage at which it is accepted."""
_WITHDRAWN: dict[_At, _At] = {
    None: None,
    Stage.LOAD_WEIGHTS: Stage.LOAD_TRAINER,
    Stage.LOAD_TRAINER: Stage.LOAD_TRAINER,
}
_UNDOS = {rule.stage: _RUNS[rule.undo] if isinstance(rule.undo, Stage) else _WITHDRAWN for rule in RING if rule.undo_command}
"""Moves of each undo. SYNC and PAUSE_KV are missing: they are undone with another stage."""


@dataclass(slots=True)
class PossibleStages:
    """One service, as far as the journal shows."""

    boot_id: str = ""
    is_absent: bool = False
    """Whether it was silent at the coordinator's last look, which then says nothing about it."""
    at: set[_At] = field(default_factory=lambda: {None})
    at_if_new: set[_At] = field(default_factory=lambda: {None})
    """Possible stages if it restarted since its boot id was last observed."""
    unknown: list[tuple[Stage, bool]] = field(default_factory=list)
    """Commands without an answer, which may run until the service answers a later one."""

    def may_be(self) -> set[_At]:
        stages = set(self.at)
        for stage, is_undo in self.unknown:
            stages |= _moved(stages, stage, is_undo=is_undo)
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

    def seen_again(self) -> None:
        """Records that the same boot id was observed later: the service had not restarted."""
        self.at_if_new = {None}

    def carried_out(self, stage: Stage, *, is_undo: bool) -> bool:
        """Records that the service reported success. Returns False if that is impossible."""
        if not _is_command(stage, is_undo=is_undo):
            return True
        at = _moved(self.may_be(), stage, is_undo=is_undo)
        self.at_if_new = _moved(self.at_if_new, stage, is_undo=is_undo) | {None}
        self.at, self.unknown = at, []
        return bool(at)

    def refused(self, stage: Stage, *, is_undo: bool) -> None:
        """Records that the service reported a refusal; earlier commands have ended."""
        if _is_command(stage, is_undo=is_undo):
            self.at, self.unknown = self.may_be(), []

    def out_of_order(self, stage: Stage, *, is_undo: bool) -> None:
        """Records that the command did not fit the service's stage: it restarted, unless a possible stage explains it."""
        self.refused(stage, is_undo=is_undo)
        if _is_command(stage, is_undo=is_undo):
            moves = (_UNDOS if is_undo else _RUNS)[stage]
            self.at = {at for at in self.at if at not in moves} or self.at | self.at_if_new

    def not_heard(self, stage: Stage, *, is_undo: bool) -> None:
        """Records a lost answer: the command may have run, or may still run."""
        if _is_command(stage, is_undo=is_undo):
            self.unknown.append((stage, is_undo))
            self.at_if_new = self.at_if_new | _moved(self.at_if_new, stage, is_undo=is_undo)


def _is_command(stage: Stage, *, is_undo: bool) -> bool:
    return not is_undo or stage in _UNDOS


def _moved(stages: set[_At], stage: Stage, *, is_undo: bool) -> set[_At]:
    moves = (_UNDOS if is_undo else _RUNS)[stage]
    return {moves[at] for at in stages if at in moves}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights held by one life of a service. boot_id: of that life. version: None if its answer was lost."""

    boot_id: str
    version: int | None
    epoch: int


@dataclass(slots=True)
class WeightsTrace:
    """Path of the weights from trainer to rollout. Methods that raise, raise Broken."""

    num_rewinds: int = 0
    _published: _Weights | None = None
    _held: _Weights | None = None
    _last: _Weights | None = None
    """Latest publication with a version, even if withdrawn since."""
    _served: dict[str, int] = field(default_factory=dict)
    """Latest version by rollout's boot id."""
    _versions: set[int] = field(default_factory=set)

    @property
    def held_version(self) -> int | None:
        return None if self._held is None else self._held.version

    @property
    def num_served(self) -> int:
        return len(self._versions)

    def carried_out(self, intent: StageRecord) -> None:
        version = intent.policy_version
        match (intent.stage, intent.is_undo):
            case (Stage.LOAD_WEIGHTS, False):
                self._publish(intent, _Weights(intent.boot_ids[Service.TRAINER], version, intent.epoch))
            case (Stage.LOAD_WEIGHTS, True) | (Stage.LOAD_TRAINER, False):
                self._published = None
            case (Stage.OFFLOAD, True) if not intent.is_settled:
                self._published = None
            case (Stage.SYNC, False):
                self._receive(intent, version)
            case (Stage.PAUSE_WEIGHTS, False) | (Stage.RESUME_WEIGHTS, True):
                self._held = None
            case (Stage.RESUME_KV, False) | (Stage.DRAIN, True):
                self._serve(intent)

    def not_heard(self, intent: StageRecord) -> None:
        """Handles a lost answer: the stage may or may not have run."""
        if intent.stage is Stage.SYNC and not intent.is_undo and self._published is not None:
            self._held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _publish(self, intent: StageRecord, weights: _Weights) -> None:
        last = self._last
        if weights.version is not None and last is not None and last.version is not None and weights.version < last.version:
            if weights.boot_id == last.boot_id or weights.epoch == last.epoch:
                expected = f"version {last.version} or a later one published, found {weights.version}"
                raise Broken.at_intent(intent, Invariant.VERSIONS_GROW, expected)
            self.num_rewinds += 1
        self._published = weights
        if weights.version is not None:
            self._last = weights

    def _receive(self, intent: StageRecord, version: int | None) -> None:
        boot_id = intent.boot_ids[Service.TRAINER]
        if self._published is None or self._published.boot_id != boot_id:
            expected = f"LOAD_WEIGHTS of the trainer with boot id {boot_id or 'unknown'} before it"
            raise Broken.at_intent(intent, Invariant.SYNC, expected)
        if version is not None and version != self._published.version:
            expected = f"version {self._published.version}, which is published, found {version}"
            raise Broken.at_intent(intent, Invariant.SYNC, expected)
        self._held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _serve(self, intent: StageRecord) -> None:
        boot_id = intent.boot_ids[Service.ROLLOUT]
        if self._held is None or self._held.boot_id != boot_id:
            expected = f"SYNC into the rollout with boot id {boot_id or 'unknown'} before it"
            raise Broken.at_intent(intent, Invariant.SERVED, expected)
        version = self._held.version
        if version is None:
            return
        if version < self._served.get(boot_id, 0):
            expected = f"version {self._served[boot_id]} or a later one, found {version}"
            raise Broken.at_intent(intent, Invariant.VERSIONS_GROW, expected)
        self._served[boot_id] = version
        self._versions.add(version)
