"""Versions published, held by rollout and served, according to a journal. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.coordinator.audit.history import StageIntent, StageResult
from tasuki.coordinator.audit.invariants import Broken, Invariant
from tasuki.wire.stages import Service, Stage


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

    def carried_out(self, intent: StageIntent, result: StageResult) -> None:
        version = result.policy_version
        match (intent.stage, intent.is_undo):
            case (Stage.LOAD_WEIGHTS, False):
                self._publish(intent, _Weights(intent.boot_ids[Service.TRAINER], version, intent.epoch))
            case (Stage.LOAD_WEIGHTS, True) | (Stage.LOAD_TRAINER, False):
                self._published = None
            case (Stage.OFFLOAD, True) if not result.is_settled:
                self._published = None
            case (Stage.SYNC, False):
                self._receive(intent, version)
            case (Stage.PAUSE_WEIGHTS, False) | (Stage.RESUME_WEIGHTS, True):
                self._held = None
            case (Stage.RESUME_KV, False) | (Stage.DRAIN, True):
                self._serve(intent)

    def not_heard(self, intent: StageIntent) -> None:
        """Handles a lost answer: the stage may or may not have run."""
        if intent.stage is Stage.SYNC and not intent.is_undo and self._published is not None:
            self._held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _publish(self, intent: StageIntent, weights: _Weights) -> None:
        last = self._last
        if weights.version is not None and last is not None and last.version is not None and weights.version < last.version:
            if weights.boot_id == last.boot_id or weights.epoch == last.epoch:
                expected = f"version {last.version} or a later one published, found {weights.version}"
                raise Broken.at_intent(intent, Invariant.VERSIONS_GROW, expected)
            self.num_rewinds += 1
        self._published = weights
        if weights.version is not None:
            self._last = weights

    def _receive(self, intent: StageIntent, version: int | None) -> None:
        boot_id = intent.boot_ids[Service.TRAINER]
        if self._published is None or self._published.boot_id != boot_id:
            expected = f"LOAD_WEIGHTS of the trainer with boot id {boot_id or 'unknown'} before it"
            raise Broken.at_intent(intent, Invariant.SYNC, expected)
        if version is not None and version != self._published.version:
            expected = f"version {self._published.version}, which is published, found {version}"
            raise Broken.at_intent(intent, Invariant.SYNC, expected)
        self._held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _serve(self, intent: StageIntent) -> None:
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
