"""Reads the commands in the services' logs, where the gate writes one line for each, and compares them with the journal."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tasuki.coordinator.history import History, Invariant, StageRecord, Violation
from tasuki.rpc.commands import PASSING
from tasuki.rpc.logs import LINES_LOST
from tasuki.wire.errors import from_reason
from tasuki.wire.line_reader import MAX_LINE_BYTES, LineReader
from tasuki.wire.regular_file import open_regular
from tasuki.wire.stages import RULES, Service, StageStatus

# Only the first match in a line: text of a caller may follow it, and remains of a progress bar may precede it.
_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ service=\S+ logger=\S+ ")
_LINE = re.compile(
    rf"event=(?:(?P<start>serving) service=|(?P<lost>{LINES_LOST})|command name=(?P<name>\S+) epoch=(?P<epoch>\d{{1,19}})"
    r" sequence=(?P<sequence>\d{1,19}) outcome=(?P<outcome>\S+) seconds=\S+"
    r"(?: boot_id=(?P<boot_id>\S*) version=(?P<version>\d{1,19}|-))? request_id=(?P<request_id>.+))"
)


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """outcome: "OK" or the reason of the error. request_id: as Python's ascii() writes it.

    boot_id: of the life that executed it. policy_version: the version that it published or received.
    """

    name: str
    epoch: int
    sequence: int
    outcome: str
    request_id: str
    boot_id: str = ""
    policy_version: int | None = None

    @property
    def is_stage(self) -> bool:
        """Whether it is numbered in the coordinator's sequence."""
        return self.sequence > 0


@dataclass(slots=True)
class LoggedLife:
    """One life of a service, as far as its log reaches."""

    commands: list[LoggedCommand] = field(default_factory=list)
    has_beginning: bool = False
    lacks_lines: bool = False
    """Whether lines were lost, as on a full disk."""


def read_command_log(path: Path) -> list[LoggedLife]:
    """Lives in a log; empty if there is no log or no service in it. Raises OSError if it cannot be read."""
    lives = [LoggedLife()]
    for line in _lines(path):
        prefix = _PREFIX.search(line)
        found = _LINE.match(line, prefix.end() if prefix is not None else 0)
        if found is None:
            continue
        if found["start"]:
            lives.append(LoggedLife(has_beginning=True))
        elif found["lost"]:
            lives[-1].lacks_lines = True
        else:
            version = found["version"] or "-"
            numbers = int(found["epoch"]), int(found["sequence"])
            known = found["boot_id"] or "", None if version == "-" else int(version)
            lives[-1].commands.append(LoggedCommand(found["name"], *numbers, found["outcome"], found["request_id"], *known))
    return [life for life in lives if life.commands or life.has_beginning or life.lacks_lines]


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            reader = LineReader()
            for line in reader.lines(file):
                yield from line.decode(errors="replace").splitlines()
            file.seek(reader.offset)  # the last line of a killed service may be incomplete
            yield from file.read(MAX_LINE_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return


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
                _check_life(service, life.commands)
            _compare(history, service, logged)
    except Violation as violation:
        return violation
    return None


def _check_life(service: Service, life: Sequence[LoggedCommand]) -> None:
    """Checks that one life ran no command twice, and its stages in order."""
    seen: set[str] = set()
    for command in life:
        if command.request_id in seen:
            raise _broken_by(
                command, Invariant.EXECUTED_ONCE, f"one execution of {command.request_id} in one life of {service}"
            )
        if command.outcome not in _PASSING:  # it was not carried out, and may be asked for again
            seen.add(command.request_id)
    last = (0, 0)
    for command in life:
        if command.is_stage and command.outcome == "OK":
            if (number := (command.epoch, command.sequence)) <= last:
                expected = f"epoch and sequence above {last[0]} and {last[1]} at {service}"
                raise _broken_by(command, Invariant.EXECUTED_IN_ORDER, expected)
            last = number


def _compare(history: History, service: Service, lives: Sequence[LoggedLife]) -> None:
    """Checks that executed commands have their intent and answer in the journal, and that none is missing in the logs."""
    intents = {ascii(intent.request_id): intent for intent in history.stages if RULES[intent.stage].service is service}
    logged = {command.request_id: command for life in lives for command in life.commands}
    pairs = [(intents[request_id], command) for request_id, command in logged.items() if request_id in intents]
    for intent, command in pairs:
        # An undo is also settled if there was nothing to undo.
        is_done = intent.status not in (None, StageStatus.FAILED) and not (intent.is_undo and intent.is_settled)
        if command.outcome != "OK" and is_done:
            expected = f"FAILED in the journal, since the service answered {command.outcome}, found {intent.status}"
            raise intent.breaks(Invariant.EXECUTED_ONCE, expected)
    for command in logged.values():
        may_have_changed = command.outcome == "OK" or from_reason(command.outcome, "", {}).code not in _CHANGED_NOTHING
        if command.is_stage and command.request_id not in intents and may_have_changed:
            expected = f"an intent in the journal for {command.request_id}, which {service} carried out"
            raise _broken_by(command, Invariant.AS_ASKED, expected)
    first_seen: dict[str, int] = {}
    for intent in history.stages:
        first_seen.setdefault(intent.boot_ids[service], intent.id)
    for intent, command in pairs:
        name = _name(intent)
        if (command.name, command.epoch, command.sequence) != (name, intent.epoch, intent.sequence):
            expected = f"{name} at epoch {intent.epoch} and sequence {intent.sequence} in the log of {service}"
            raise intent.breaks(Invariant.AS_ASKED, expected)
        if command.outcome == "OK" and intent.status is not None and not intent.is_settled:
            _check_answer(service, intent, command, first_seen=first_seen)
    for life in lives:
        if not life.lacks_lines:
            _check_none_missing(service, life, intents, logged)


def _check_answer(service: Service, intent: StageRecord, command: LoggedCommand, *, first_seen: Mapping[str, int]) -> None:
    """first_seen: boot id to the first intent that mentions it."""
    known = intent.boot_ids[service]  # empty when it was silent then
    # It may have restarted since it was observed; its new life is then unknown here.
    if known and command.boot_id not in ("", known) and first_seen.get(command.boot_id, intent.id + 1) <= intent.id:
        expected = f"{service} with boot id {command.boot_id}, which carried it out, found {known}"
        raise intent.breaks(Invariant.AS_ASKED, expected)
    if None not in (versions := {command.policy_version, intent.policy_version}) and len(versions) > 1:
        expected = f"version {command.policy_version}, as {service} says, found {intent.policy_version}"
        raise intent.breaks(Invariant.AS_ASKED, expected)


def _check_none_missing(service: Service, life: LoggedLife, intents: Mapping[str, StageRecord], logged: Iterable[str]) -> None:
    """Checks up to the last line of a life: later lines may be lost to a machine crash."""
    numbers = [(command.epoch, command.sequence) for command in life.commands if command.is_stage]
    if not numbers:
        return
    boots = {command.boot_id for command in life.commands if command.boot_id and life.has_beginning}
    for request_id, intent in intents.items():
        if intent.status in (None, StageStatus.FAILED) or intent.is_settled or not _name(intent):
            continue
        number = (intent.epoch, intent.sequence)
        is_of_life = min(numbers) <= number or intent.boot_ids[service] in boots
        if is_of_life and number <= max(numbers) and request_id not in logged:
            expected = f"a line for {request_id} in the log of {service}, found {intent.status} in the journal alone"
            raise intent.breaks(Invariant.AS_ASKED, expected)


def _name(intent: StageRecord) -> str:
    """Name of the command in the service's log; empty if none is sent."""
    return RULES[intent.stage].undo_command if intent.is_undo else intent.stage


def _broken_by(command: LoggedCommand, invariant: Invariant, expected: str) -> Violation:
    return Violation(invariant, f"{expected}, at {command.name}", epoch=command.epoch, sequence=command.sequence)
