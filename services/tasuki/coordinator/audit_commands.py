"""Compares what the services say they did with what the journal says they were asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasuki.coordinator.history import History
from tasuki.coordinator.invariants import Broken, Invariant, Violation
from tasuki.coordinator.records import Status
from tasuki.rpc.command_log import LoggedCommand


def audit_commands(history: History, lives: Mapping[str, Sequence[Sequence[LoggedCommand]]]) -> Violation | None:
    """lives: of each service what `read_command_log` gives, which need not reach back to the beginning."""
    try:
        for service, commands in lives.items():
            for life in commands:
                _check_once(service, life)
                _check_order(service, life)
        _check_results(history, [command for commands in lives.values() for life in commands for command in life])
    except Broken as broken:
        return broken.violation
    return None


def _check_once(service: str, life: Sequence[LoggedCommand]) -> None:
    seen: set[str] = set()
    for command in life:
        if command.request_id in seen:
            raise _of(command, Invariant.EXECUTED_ONCE, f"one execution of {command.request_id} in one life of {service}")
        seen.add(command.request_id)


def _check_order(service: str, life: Sequence[LoggedCommand]) -> None:
    last = (0, 0)
    for command in life:
        if command.sequence and command.outcome == "OK":
            if (command.epoch, command.sequence) <= last:
                expected = f"epoch and sequence above {last[0]} and {last[1]} at {service}"
                raise _of(command, Invariant.EXECUTED_IN_ORDER, expected)
            last = (command.epoch, command.sequence)


def _check_results(history: History, commands: Sequence[LoggedCommand]) -> None:
    outcomes = {command.request_id: command.outcome for command in commands}
    results = {result.id: result for result in history.results}
    for intent in history.intents:
        outcome, result = outcomes.get(ascii(intent.request_id)), results.get(intent.id)
        if outcome not in (None, "OK") and result is not None and result.status is not Status.FAILED:
            expected = f"FAILED in the journal, since the service answered {outcome}, found {result.status}"
            raise Broken.at_intent(intent, Invariant.EXECUTED_ONCE, expected)


def _of(command: LoggedCommand, invariant: Invariant, expected: str) -> Broken:
    return Broken(Violation(invariant, f"{expected}, at {command.name}", epoch=command.epoch, sequence=command.sequence))
