"""What a journal lets one service be: the stages that it may have completed last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tasuki.coordinator.phases import Stage

_At = Stage | None
"""The last stage that a service says it completed; None: freshly started."""
_ROLLOUT = (
    None,
    Stage.RESUME_WEIGHTS,
    Stage.SYNC,
    Stage.RESUME_KV,
    Stage.DRAIN,
    Stage.PAUSE_KV,
    Stage.PAUSE_WEIGHTS,
)


def _all_to(stage: Stage, after: Iterable[_At]) -> dict[_At, _At]:
    return dict.fromkeys(after, stage)


# Where a command leads from wherever a service accepts it. Rollout gives memory up from anywhere, once it is poisoned.
_RUNS: dict[Stage, Mapping[_At, _At]] = {
    Stage.LOAD_WEIGHTS: _all_to(Stage.LOAD_WEIGHTS, (None, Stage.LOAD_TRAINER)),
    Stage.OFFLOAD: _all_to(Stage.OFFLOAD, (None, Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS)),
    Stage.LOAD_TRAINER: _all_to(Stage.LOAD_TRAINER, (None, Stage.OFFLOAD)),
    Stage.RESUME_WEIGHTS: _all_to(Stage.RESUME_WEIGHTS, (None, Stage.PAUSE_WEIGHTS)),
    Stage.SYNC: _all_to(Stage.SYNC, (Stage.RESUME_WEIGHTS,)),
    Stage.RESUME_KV: _all_to(Stage.RESUME_KV, (Stage.SYNC, Stage.DRAIN, Stage.PAUSE_KV)),
    Stage.DRAIN: _all_to(Stage.DRAIN, (Stage.RESUME_KV,)),
    Stage.PAUSE_KV: _all_to(Stage.PAUSE_KV, _ROLLOUT),
    Stage.PAUSE_WEIGHTS: _all_to(Stage.PAUSE_WEIGHTS, _ROLLOUT),
}
_UNDOS: dict[Stage, Mapping[_At, _At]] = {
    Stage.LOAD_WEIGHTS: {None: None, **_all_to(Stage.LOAD_TRAINER, (Stage.LOAD_WEIGHTS, Stage.LOAD_TRAINER))},
    Stage.OFFLOAD: _RUNS[Stage.LOAD_TRAINER],
    Stage.LOAD_TRAINER: _RUNS[Stage.OFFLOAD],
    Stage.RESUME_WEIGHTS: _RUNS[Stage.PAUSE_WEIGHTS],
    Stage.RESUME_KV: _RUNS[Stage.PAUSE_KV],
    Stage.DRAIN: _RUNS[Stage.RESUME_KV],
}
"""SYNC and PAUSE_KV are missing: no command takes them back, they go with another stage's undo."""


@dataclass(slots=True)
class PossibleStages:
    """One service, as far as the journal tells."""

    boot_id: str = ""
    is_absent: bool = False
    """Whether it did not answer when the coordinator looked last: what was seen then says nothing of it."""
    at: set[_At] = field(default_factory=lambda: {None})
    at_if_new: set[_At] = field(default_factory=lambda: {None})
    """The same, if it was started anew since its boot id was seen last."""
    unknown: list[tuple[Stage, bool]] = field(default_factory=list)
    """Commands without an answer. They may be carried out until the service answers a later one."""

    def may_be(self) -> set[_At]:
        stages = set(self.at)
        for stage, is_undo in self.unknown:
            stages |= _moved(stages, stage, is_undo=is_undo)
        return stages

    def seen(self, boot_id: str) -> None:
        """The coordinator saw this boot id; empty when the service did not answer, and counts as freshly started."""
        self.is_absent = not boot_id
        if not boot_id:
            self.at = self.may_be() | self.at_if_new
        elif boot_id != self.boot_id:
            self.at = self.at | self.at_if_new if not self.boot_id else set(self.at_if_new)
            self.boot_id, self.unknown = boot_id, []
            self.at_if_new = {None}

    def seen_again(self) -> None:
        """A new look at the same boot id: it was not started anew before."""
        self.at_if_new = {None}

    def carried_out(self, stage: Stage, *, is_undo: bool) -> bool:
        """The service says that it did. False when it cannot have."""
        if not _is_command(stage, is_undo=is_undo):
            return True
        at = _moved(self.may_be(), stage, is_undo=is_undo)
        self.at_if_new = _moved(self.at_if_new, stage, is_undo=is_undo) | {None}
        self.at, self.unknown = at, []
        return bool(at)

    def refused(self, stage: Stage, *, is_undo: bool) -> None:
        """The service says that it did not; whatever was asked before has ended."""
        if _is_command(stage, is_undo=is_undo):
            self.at, self.unknown = self.may_be(), []

    def out_of_order(self, stage: Stage, *, is_undo: bool) -> None:
        """The service says that the command does not fit where it is: it was started anew, unless there is such a place."""
        self.refused(stage, is_undo=is_undo)
        if _is_command(stage, is_undo=is_undo):
            moves = (_UNDOS if is_undo else _RUNS)[stage]
            self.at = {at for at in self.at if at not in moves} or self.at | self.at_if_new

    def not_heard(self, stage: Stage, *, is_undo: bool) -> None:
        """Nobody knows whether the service did, or still will."""
        if _is_command(stage, is_undo=is_undo):
            self.unknown.append((stage, is_undo))
            self.at_if_new = self.at_if_new | _moved(self.at_if_new, stage, is_undo=is_undo)


def _is_command(stage: Stage, *, is_undo: bool) -> bool:
    return not is_undo or stage in _UNDOS


def _moved(stages: set[_At], stage: Stage, *, is_undo: bool) -> set[_At]:
    moves = (_UNDOS if is_undo else _RUNS)[stage]
    return {moves[at] for at in stages if at in moves}
