"""Compares the services' logs with the commands in the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import grpc

from tasuki.coordinator.audit.history import Broken, History, Invariant, StageRecord, Violation
from tasuki.rpc.command_log import LoggedCommand, LoggedLife
from tasuki.rpc.commands import PASSING
from tasuki.wire.errors import from_reason
from tasuki.wire.stages import RULES, Service, StageStatus

_PASSING = [error.reason for error in PASSING]
_CHANGED_NOTHING = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


def audit_commands(history: History, lives: Mapping[Service, Sequence[LoggedLife]]) -> Violation | None:
    """Compares every logged life with the journal.

    lives: of each service, oldest first; they need not reach back to the beginning. Read the logs before the journal, so that every
    logged command already has its intent.
    """
    try:
        for service, logged in lives.items():
            for life in logged:
                _check_once(service, life.commands)
                _check_order(service, life.commands)
            comparison = _Comparison(history, service, logged)
            comparison.check_results()
            comparison.check_asked()
            comparison.check_none_missing()
    except Broken as broken:
        return broken.violation
    return None


def _check_once(service: Service, life: Sequence[LoggedCommand]) -> None:
    seen: set[str] = set()
    for command in life:
        if command.request_id in seen:
            raise _of(command, Invariant.EXECUTED_ONCE, f"one execution of {command.request_id} in one life of {service}")
        if command.outcome not in _PASSING:  # it was not carried out, and may be asked for again
            seen.add(command.request_id)


def _check_order(service: Service, life: Sequence[LoggedCommand]) -> None:
    last = (0, 0)
    for command in life:
        if command.is_stage and command.outcome == "OK":
            if _number(command) <= last:
                expected = f"epoch and sequence above {last[0]} and {last[1]} at {service}"
                raise _of(command, Invariant.EXECUTED_IN_ORDER, expected)
            last = _number(command)


class _Comparison:
    """Compares one service's logs with the journal."""

    def __init__(self, history: History, service: Service, lives: Sequence[LoggedLife]) -> None:
        self._service, self._lives = service, lives
        self._intents = {
            ascii(intent.request_id): intent for intent in history.stages if RULES[intent.stage].service is service
        }
        self._logged = {command.request_id: command for life in lives for command in life.commands}
        self._first_seen: dict[str, int] = {}
        """Boot id to the first intent that mentions it."""
        for intent in history.stages:
            self._first_seen.setdefault(intent.boot_ids[service], intent.id)

    def check_results(self) -> None:
        for intent, command in self._pairs():
            # An undo is also settled if there was nothing to undo.
            is_done = intent.status not in (None, StageStatus.FAILED) and not (intent.is_undo and intent.is_settled)
            if command.outcome != "OK" and is_done:
                expected = f"FAILED in the journal, since the service answered {command.outcome}, found {intent.status}"
                raise Broken.at_intent(intent, Invariant.EXECUTED_ONCE, expected)

    def check_asked(self) -> None:
        """Checks that every executed stage command has a matching intent."""
        for command in self._logged.values():
            if command.is_stage and command.request_id not in self._intents and _may_have_changed(command):
                expected = f"an intent in the journal for {command.request_id}, which {self._service} carried out"
                raise _of(command, Invariant.AS_ASKED, expected)
        for intent, command in self._pairs():
            name = _name(intent)
            if (command.name, *_number(command)) != (name, intent.epoch, intent.sequence):
                expected = f"{name} at epoch {intent.epoch} and sequence {intent.sequence} in the log of {self._service}"
                raise _of(command, Invariant.AS_ASKED, expected)
            if command.outcome == "OK" and intent.status is not None and not intent.is_settled:
                self._check_answer(intent, command)

    def _check_answer(self, intent: StageRecord, command: LoggedCommand) -> None:
        known = intent.boot_ids[self._service]  # empty when it was silent then
        # It may have restarted since it was observed; its new life is then unknown here.
        if known and command.boot_id not in ("", known) and self._first_seen.get(command.boot_id, intent.id + 1) <= intent.id:
            expected = f"{self._service} with boot id {command.boot_id}, which carried it out, found {known}"
            raise Broken.at_intent(intent, Invariant.AS_ASKED, expected)
        if None not in (versions := {command.policy_version, intent.policy_version}) and len(versions) > 1:
            expected = f"version {command.policy_version}, as {self._service} says, found {intent.policy_version}"
            raise Broken.at_intent(intent, Invariant.AS_ASKED, expected)

    def check_none_missing(self) -> None:
        """Checks up to the last line of a life: later lines may be lost to a machine crash."""
        for life in self._lives:
            numbers = [_number(command) for command in life.commands if command.is_stage]
            if life.lacks_lines or not numbers:
                continue
            boots = {command.boot_id for command in life.commands if command.boot_id and life.has_beginning}
            for request_id, intent in self._intents.items():
                number = (intent.epoch, intent.sequence)
                is_inside = min(numbers) <= number <= max(numbers)
                is_inside |= intent.boot_ids[self._service] in boots and number <= max(numbers)
                if intent.status in (None, StageStatus.FAILED) or intent.is_settled or not _name(intent):
                    continue
                if is_inside and request_id not in self._logged:
                    expected = (
                        f"a line for {request_id} in the log of {self._service}, found {intent.status} in the journal alone"
                    )
                    raise Broken.at_intent(intent, Invariant.AS_ASKED, expected)

    def _pairs(self) -> Iterator[tuple[StageRecord, LoggedCommand]]:
        for request_id, command in self._logged.items():
            if request_id in self._intents:
                yield self._intents[request_id], command


def _name(intent: StageRecord) -> str:
    """Name of the command in the service's log; empty if none is sent."""
    return RULES[intent.stage].undo_command if intent.is_undo else intent.stage


def _may_have_changed(command: LoggedCommand) -> bool:
    return command.outcome == "OK" or from_reason(command.outcome, "", {}).code not in _CHANGED_NOTHING


def _number(command: LoggedCommand) -> tuple[int, int]:
    return command.epoch, command.sequence


def _of(command: LoggedCommand, invariant: Invariant, expected: str) -> Broken:
    return Broken(Violation(invariant, f"{expected}, at {command.name}", epoch=command.epoch, sequence=command.sequence))
