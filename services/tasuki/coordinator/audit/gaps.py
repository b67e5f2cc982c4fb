"""Checks that no numbered row is missing from a journal, and that lives of services do not interleave. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasuki.coordinator.audit.history import History, StageIntent
from tasuki.coordinator.audit.invariants import Broken, Invariant
from tasuki.coordinator.journal_file import id_number, id_text
from tasuki.wire.errors import StaleSequence
from tasuki.wire.stages import Service


def check_gaps(history: History) -> None:
    """Raises Broken at the first missing number, or where a life of a service comes back after another."""
    _check_none_missing("epochs", history.epochs, history, name=lambda number: f"epoch {number}")
    changeovers = [id_number(changeover.id) for changeover in history.changeovers]
    _check_none_missing("changeovers", changeovers, history, name=id_text)
    _check_none_missing("stages", [intent.id for intent in history.intents], history, name=lambda number: f"intent {number}")
    _check_sequences(history)
    for service in Service:
        _check_lives(service, history.intents)


def _check_none_missing(table: str, numbers: Sequence[int], history: History, *, name: Callable[[int], str]) -> None:
    """Checks that rows are numbered from 1 without a gap; the number of a row that failed to write is reused."""
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            raise Broken.at_changeover(Invariant.NONE_MISSING, f"{name(expected)}, found {name(number)} in its place")
    highest = history.highest.get(table, 0)
    if highest > len(numbers):
        text = f"{name(len(numbers) + 1)}, since the journal has numbered {table} up to {highest}"
        raise Broken.at_changeover(Invariant.NONE_MISSING, text)


def _check_sequences(history: History) -> None:
    passed_over = {result.id for result in history.results if result.error_reason == StaleSequence.reason}
    epoch, sequence = 0, 0
    for intent in history.intents:
        sequence = sequence + 1 if intent.epoch == epoch else 1
        # Another caller used numbers in a service: the coordinator continues after those.
        if intent.sequence != sequence and not (sequence > 1 and intent.id - 1 in passed_over):
            raise Broken.at_intent(intent, Invariant.NONE_MISSING, f"sequence {sequence}, found {intent.sequence}")
        epoch, sequence = intent.epoch, intent.sequence


def _check_lives(service: Service, intents: Sequence[StageIntent]) -> None:
    now, over = "", set[str]()
    for intent in intents:
        boot_id = intent.boot_ids[service]
        if boot_id in over:
            text = f"{service} with boot id {now}, which came after {boot_id}"
            raise Broken.at_intent(intent, Invariant.LIVES_IN_ORDER, text)
        if boot_id and boot_id != now:
            over |= {now} - {""}
            now = boot_id
