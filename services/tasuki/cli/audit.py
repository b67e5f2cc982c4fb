"""`tasuki audit`: checks from a run's records whether it kept its invariants."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.paths import fleet_journal_path, journal_path, log_path, training_log_path
from tasuki.coordinator.command_log import LoggedLife, audit_commands, read_command_log
from tasuki.coordinator.history import Invariant, Violation, read_history
from tasuki.coordinator.replay import audit
from tasuki.fleet.journal import audit_fleet_journal
from tasuki.runs.folder import archive_folder
from tasuki.trainer.durable.training_log import first_repetition, read_training_log
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.wire.errors import InvalidArgument, PathNotFound, PathPermissionDenied
from tasuki.wire.stages import Service

CLEAN, BROKEN, UNREADABLE = 0, 1, 2


def run(arguments: argparse.Namespace) -> int:
    """Audits the run at `run_path` and prints the result. Returns 0 if it is clean, 1 for a violation, 2 if a part is unreadable.

    Raises PathNotFound, PathPermissionDenied, and InvalidArgument for an unreadable journal.
    """
    folder, journal, is_of_node = _place(arguments.run_path)
    # Read before the journal, since a node may be running.
    lives, unreadable = _all_lives(folder)
    history = read_history(journal)
    found = audit(history)
    found = replace(found, violation=found.violation or audit_commands(history, lives))
    fleet_journal = fleet_journal_path(folder)
    fleet = audit_fleet_journal(fleet_journal) if fleet_journal.is_file() else None
    if fleet is not None:
        found = replace(found, violation=found.violation or fleet.violation)
    log, records, problems = training_log_path(folder), list[TrainingRecord](), list(unreadable)
    try:
        records = read_training_log(log) if log.exists() else []
    except (InvalidArgument, PathPermissionDenied, OSError) as error:
        problems.append(f"{error}, so what was trained cannot be audited")
    repetition = first_repetition(records)
    if repetition and found.violation is None:
        found = replace(found, violation=Violation(Invariant.TRAINED_ONCE, repetition))
    num_commands = sum(len(life.commands) for of_service in lives.values() for life in of_service)
    counts = {
        **{name: count for name, count in asdict(found).items() if name != "violation"},
        "num_logged_commands": num_commands,
        "num_training_records": len(records),
    }
    if fleet is not None:
        counts |= {f"num_fleet_{name}": getattr(fleet, f"num_{name}") for name in ("changeovers", "decisions", "steps")}
    report = {
        "is_clean": found.violation is None and not problems,
        "violation": None if found.violation is None else asdict(found.violation),
        "problems": problems,
        "not_audited": _not_audited(folder, lives),
        "journal": str(journal),
        "loads": [asdict(load) for load in history.loads],
        **counts,
    }
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_text(found.violation, report, counts, is_of_node=is_of_node))
    if found.violation is not None:
        return BROKEN
    return UNREADABLE if problems else CLEAN


def _not_audited(folder: Path, lives: Mapping[Service, Sequence[LoggedLife]]) -> tuple[str, ...]:
    lacking: list[str] = []
    for service, logged in lives.items():
        log = log_path(folder, service)
        if not logged:
            lacking.append(f"commands of {service}: {log} has none")
        elif not all(life.has_beginning for life in logged):
            lacking.append(f"commands of {service} after a start: missing in {log}")
        if any(life.lacks_lines for life in logged):
            lacking.append(f"whether {service} ran every command in the journal: {log} lost lines")
    if not training_log_path(folder).exists():
        lacking.append(f"training: there is no {training_log_path(folder)}")
    return tuple(lacking)


def _place(path: Path) -> tuple[Path, Path, bool]:
    """Finds the archive from a configuration, a folder or a journal: its folder, its journal, and whether that is the node's, because
    the run has no copy yet."""
    if path.suffix == ".toml":
        path = load_config(path).state_dir
    if path.is_dir():
        folder = archive_folder(path)
        return folder, journal_path(folder), folder != path
    if not path.exists():
        raise PathNotFound(f"there is nothing at {path}; give a state folder, an output folder or a journal", path=path)
    return path.parent, path, False


def _all_lives(folder: Path) -> tuple[dict[Service, list[LoggedLife]], list[str]]:
    """Lives of each service whose logs still exist, and why a log cannot be read; a service with such a log is left out."""
    lives, problems = dict[Service, list[LoggedLife]](), list[str]()
    for service in Service:
        log = log_path(folder, service)
        try:
            lives[service] = [life for place in (log.with_suffix(".log.old"), log) for life in read_command_log(place)]
        except OSError as error:
            problems.append(f"{error.filename} cannot be read: {error.strerror}, so commands of {service} cannot be audited")
    return lives, problems


def _text(violation: Violation | None, report: Mapping[str, Any], counts: Mapping[str, Any], *, is_of_node: bool) -> str:
    lines = ["clean" if violation is None else f"broken: {violation.invariant}"]
    if violation is not None:
        where = (violation.changeover_id, violation.stage, violation.epoch, violation.sequence)
        names = ("changeover", "stage", "epoch", "sequence")
        lines += [f"  {name}: {value}" for name, value in zip(names, where, strict=True) if value]
        lines.append(f"  expected: {violation.expected}")
    if report["problems"]:
        lines[0] = f"incomplete: apart from what cannot be read, {lines[0]}"
        lines += [f"  {problem}" for problem in report["problems"]]
    # Of a broken run counting ended at the violation.
    told = [f"{name.removeprefix('num_')}={count}" for name, count in counts.items() if count or violation is None]
    lines.append(("" if violation is None else "counted before the violation: ") + (" ".join(told) or "nothing"))
    loaded = "loaded: version {policy_version} from {path}, first published in {changeover_id}"
    lines += [loaded.format_map(load) for load in report["loads"]]
    if is_of_node:
        lines.append(f"read: {report['journal']} of the node; the run's folder gets its copy when `tasuki train` ends")
    lines += [f"not audited: {lacking}" for lacking in report["not_audited"]]
    return "\n".join(lines) + "\n"
