"""Closes the entries that an earlier life of the coordinator left open in the journal."""

from __future__ import annotations

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.phases import since_phase
from tasuki.coordinator.records import Outcome
from tasuki.memory.stages import Stage
from tasuki.wire.errors import Interrupted


def close_interrupted(journal: Journal) -> str:
    """Ends changeovers left open by earlier epochs. Returns the error of the last changeover, empty if it succeeded."""
    for left in journal.unfinished():
        error = Interrupted(f"the coordinator stopped in the middle of {left.changeover_id}", changeover_id=left.changeover_id)
        journal.end_changeover(left.changeover_id, seconds=0.0, error=error)
    latest = journal.latest()
    return f"{latest.error_reason}: {latest.error_message}" if latest is not None and latest.error_reason else ""


_WITH_WEIGHTS = (Stage.RESUME_KV, Stage.DRAIN, Stage.PAUSE_KV)
"""Stages at which rollout still holds weights from RESUME_WEIGHTS, although a phase has held since then."""


def resolve_intents(journal: Journal, at: Stage) -> None:
    """Gives stages without a result the outcome that the services show."""
    for intent in journal.unresolved():
        is_left = intent.stage in (at, *since_phase(at)) or (intent.stage is Stage.RESUME_WEIGHTS and at in _WITH_WEIGHTS)
        if is_left is not intent.is_undo:
            journal.done(intent, Outcome(), seconds=0.0)
        else:
            journal.failed(intent, Interrupted(f"the coordinator stopped before {intent.stage} was answered"), seconds=0.0)
