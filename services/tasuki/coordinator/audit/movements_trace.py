"""Background movements recorded in a journal, and whether they ended in time. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tasuki.coordinator.audit.history import StageIntent, StageResult
from tasuki.coordinator.audit.invariants import Broken, Invariant
from tasuki.coordinator.movement_rows import MovementRows
from tasuki.memory.stages import RULES, Service, Stage
from tasuki.memory.tags import Movement, MovementKind

_BEGINS = {
    Stage.OFFLOAD: MovementKind.LEAVE,
    Stage.LOAD_TRAINER: MovementKind.RETURN,
    Stage.RESUME_KV: MovementKind.GROW,
}
_ENDS = {
    Stage.LOAD_TRAINER: MovementKind.LEAVE,
    Stage.OFFLOAD: MovementKind.RETURN,
    Stage.PAUSE_KV: MovementKind.GROW,
}
"""Stages whose answer means that the movement has ended."""


@dataclass(frozen=True, slots=True)
class _Open:
    """Background movements of one life of a service."""

    boot_id: str
    movements: tuple[Movement, ...]


@dataclass(frozen=True, slots=True)
class _Suspect:
    """Breach, unless the service turns out to have restarted before the answer."""

    boot_id: str
    changeover_id: str
    broken: Broken


@dataclass(slots=True)
class MovementsTrace:
    """Background movements of both services. Every method may raise Broken."""

    rows: MovementRows
    num_ended: int = 0
    _open: dict[Service, _Open] = field(default_factory=dict)
    """Movements by service; None while unknown, after a lost answer."""
    _suspects: dict[Service, _Suspect] = field(default_factory=dict)

    def seen(self, intent: StageIntent) -> None:
        """Adopts the boot ids of an intent. Those of a later changeover show whether a service restarted meanwhile."""
        for service, suspect in list(self._suspects.items()):
            if suspect.changeover_id != intent.changeover_id:
                del self._suspects[service]
                if suspect.boot_id == intent.boot_ids[service]:
                    raise suspect.broken

    def carried_out(self, intent: StageIntent, result: StageResult) -> None:
        stage = RULES[intent.stage].undo if intent.is_undo else intent.stage
        if not isinstance(stage, Stage):
            return
        service = RULES[stage].service
        if result.is_settled:
            self.not_heard(intent)
            return
        known = going_on = self._going_on(service, intent)
        for ended in self.rows.ended(intent.id):
            self.num_ended += 1
            if known is None or going_on is None:
                continue
            if stage is Stage.LOAD_TRAINER and ended.kind is MovementKind.RETURN:
                self._end(intent, ended, _may_return_early(known))
            else:
                going_on = self._end(intent, ended, going_on)
        late = [one for one in going_on or () if one.kind is _ENDS.get(stage)]
        if late:
            expected = f"the end of {late[0].kind} of {late[0].tag}, {late[0].num_bytes} bytes"
            broken = Broken.at_intent(intent, Invariant.MOVEMENTS, expected)
            self._suspects[service] = _Suspect(intent.boot_ids[service], intent.changeover_id, broken)
        begun = self.rows.begun(intent.id)
        if any(one.kind is not _BEGINS.get(stage) for one in begun):
            raise Broken.at_intent(intent, Invariant.MOVEMENTS, f"nothing but {_BEGINS.get(stage, 'no movement')} behind it")
        if stage in _BEGINS or stage in _ENDS:
            self._open[service] = _Open(intent.boot_ids[service], begun)

    def not_heard(self, intent: StageIntent) -> None:
        """Handles a lost answer: execution and movements are unknown."""
        self._open.pop(RULES[intent.stage].service, None)

    def _going_on(self, service: Service, intent: StageIntent) -> tuple[Movement, ...] | None:
        known = self._open.get(service)
        return known.movements if known is not None and known.boot_id == intent.boot_ids[service] else None

    def _end(self, intent: StageIntent, ended: Movement, going_on: tuple[Movement, ...]) -> tuple[Movement, ...]:
        begun = [one for one in going_on if (one.kind, one.tag) == (ended.kind, ended.tag)]
        if not begun:
            expected = f"the beginning of {ended.kind} of {ended.tag}, which has ended"
            raise Broken.at_intent(intent, Invariant.MOVEMENTS, expected)
        if ended.num_bytes > begun[0].num_bytes:
            expected = f"at most {begun[0].num_bytes} bytes by {ended.kind} of {ended.tag}, found {ended.num_bytes}"
            raise Broken.at_intent(intent, Invariant.MOVEMENTS, expected)
        return tuple(one for one in going_on if one is not begun[0])


def _may_return_early(movements: tuple[Movement, ...]) -> tuple[Movement, ...]:
    """Returns that no answer could announce: of what had left, between two stages."""
    return tuple(replace(one, kind=MovementKind.RETURN) for one in movements if one.kind is MovementKind.LEAVE)
