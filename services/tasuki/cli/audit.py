"""`tasuki audit`: whether a run kept its promises, from what it left behind."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.places import journal_path, log_path, training_log_path
from tasuki.coordinator.audit import Audit, audit
from tasuki.coordinator.audit_commands import audit_commands
from tasuki.coordinator.history import read_history
from tasuki.coordinator.invariants import Invariant, Violation
from tasuki.rpc.command_log import LoggedCommand, read_command_log
from tasuki.trainer.training_audit import first_repetition
from tasuki.trainer.training_log import read_training_log
from tasuki.wire.errors import PathNotFound

CLEAN, BROKEN = 0, 1


def run(path: Path, *, as_json: bool) -> int:
    """Audits the run at `path` and says what it found: 0 when it is clean, 1 when a promise was broken.

    Raises PathNotFound, and InvalidArgument for what cannot be read.
    """
    folder, journal = _place(path)
    history = read_history(journal)
    found = audit(history)
    lives = {service: _lives(folder, service) for service in ("trainer", "rollout")}
    found = replace(found, violation=found.violation or audit_commands(history, lives))
    num_commands = sum(len(life) for commands in lives.values() for life in commands)
    num_trained = 0
    if training_log_path(folder).exists():
        records = read_training_log(training_log_path(folder))
        num_trained = len(records)
        repetition = first_repetition(records)
        if repetition and found.violation is None:
            found = replace(found, violation=Violation(Invariant.TRAINED_ONCE, repetition))
    counts = {**_counts(found), "num_logged_commands": num_commands, "num_training_records": num_trained}
    if as_json:
        told = None if found.violation is None else asdict(found.violation)
        sys.stdout.write(json.dumps({"is_clean": told is None, "violation": told, **counts}, indent=2) + "\n")
    else:
        sys.stdout.write(_text(found.violation, counts))
    return CLEAN if found.violation is None else BROKEN


def _place(path: Path) -> tuple[Path, Path]:
    """The folder of a run and its journal, from a configuration, a folder or a journal."""
    if path.suffix == ".toml":
        path = load_config(path).state_dir
    if path.is_dir():
        return path, journal_path(path)
    if not path.exists():
        raise PathNotFound(f"there is nothing at {path}; give a state folder, an output folder or a journal", path=path)
    return path.parent, path


def _lives(folder: Path, service: str) -> list[list[LoggedCommand]]:
    """The lives of a service whose logs are left; of older ones there is none."""
    log = log_path(folder, service)
    return [life for place in (log.with_suffix(".log.old"), log) for life in read_command_log(place)]


def _counts(found: Audit) -> dict[str, Any]:
    counts = asdict(found)
    del counts["violation"]
    return counts


def _text(violation: Violation | None, counts: dict[str, Any]) -> str:
    lines = ["clean" if violation is None else f"broken: {violation.invariant}"]
    if violation is not None:
        where = {
            "changeover": violation.changeover_id,
            "stage": violation.stage,
            "epoch": violation.epoch,
            "sequence": violation.sequence,
        }
        lines += [f"  {name}: {value}" for name, value in where.items() if value]
        lines.append(f"  expected: {violation.expected}")
    lines.append(" ".join(f"{name.removeprefix('num_')}={count}" for name, count in counts.items()))
    return "\n".join(lines) + "\n"
