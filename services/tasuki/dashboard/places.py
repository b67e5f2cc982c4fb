"""Locations of the files to show: a run's output folder, its archive, and the node that it may still be on. Reads its small files."""

import json
import sqlite3
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.config.load import config_of, leaves, put, toml_lines
from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, lock_path
from tasuki.config.paths import (
    archived_config_path,
    config_path,
    journal_path,
    training_output_path,
)
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import TrainConfig
from tasuki.runs.folder import EVALUATIONS, NODE_FILE, SAMPLES, archive_folder
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import PathNotFound, TasukiError
from tasuki.wire.regular_file import read_path, read_regular, unreadable

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, sqlite3.Error)
"""What reading a damaged or foreign file raises, besides OSError."""


def problem_of(path: Path, error: Exception) -> str:
    """A line that says why `path` cannot be read; empty if it is missing."""
    return unreadable(path, error) if isinstance(error, OSError) else f"{path} cannot be read: {type(error).__name__}: {error}"


class Followed(ABC):
    """Whatever prevents the file from being read becomes `problem`; the rest of the run is shown."""

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""

    def advance(self) -> bool:
        """Reads on. Returns whether there was anything new, if only a problem."""
        before, is_new = self.problem, False
        try:
            is_new, self.problem = self.read_on(), ""
        except (OSError, *MALFORMED) as error:
            self.problem = problem_of(self.path, error)
        return is_new or self.problem != before

    @abstractmethod
    def read_on(self) -> bool:
        """Returns whether there was anything new. Raises OSError or one of MALFORMED."""


_MAX_BYTES = 1_000_000
_OF_RUN = ("metrics.jsonl", "summary.json", "run.json", "state_dir", SAMPLES)
"""Files of a run's output folder, of which its first steps need not have made all."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """output_dir: of the run; None if the node has none. archive: folder of journal and logs; the node's own while it runs."""

    output_dir: Path | None
    archive: Path
    config: Path | None
    """The node's configuration as its services read it."""
    problem: str = ""
    """Why the file that names the node, or its run, cannot be read."""

    def is_on(self, state_dir: Path) -> bool:
        """Whether this is a node's folder or the newest run on it, which may have ended."""
        if self.archive.resolve() == state_dir.resolve():
            return True
        with suppress(OSError):
            return self.output_dir is not None and read_path(training_output_path(state_dir)) == self.output_dir.resolve()
        return False

    @property
    def samples(self) -> Path | None:
        return None if self.output_dir is None else self.output_dir / SAMPLES

    @property
    def evaluations(self) -> Path | None:
        return None if self.output_dir is None else self.output_dir / EVALUATIONS


def place_of(folder: Path) -> RunPlace:
    """Location for an output folder or a node's state folder. Called repeatedly, since runs begin and end.

    An empty folder may be of a run or node that is yet to begin. Raises PathNotFound, PathPermissionDenied.
    """
    with named_if_denied(folder):
        _check_folder(folder)
    if config_path(folder).is_file() and journal_path(folder).is_file() and not archived_config_path(folder).is_file():
        return place_of_node(folder)
    archive, problem = folder, ""
    try:
        archive = archive_folder(folder)
    except OSError as error:
        problem = unreadable(folder / NODE_FILE, error)
    config = config_path(archive) if archive != folder else archived_config_path(folder)
    return RunPlace(folder, archive, config if config.is_file() else None, problem)


def _check_folder(folder: Path) -> None:
    advice = "give the output folder of a run, or the state folder or CONFIG of a node"
    if not folder.is_dir():
        raise PathNotFound(f"there is no folder {folder}; {advice}", path=folder)
    of_node = (
        journal_path(folder),
        config_path(folder),
        *(lock_path(folder, name=name) for name in (NODE_LOCK, TRAINING_LOCK)),
    )
    signs = (*of_node, *(folder / name for name in _OF_RUN))
    if any(path.exists() for path in signs):
        return
    try:
        with named_if_denied(folder):
            is_empty = not any(folder.iterdir())
    except OSError as error:
        raise PathNotFound(f"{folder} cannot be read: {error.strerror}; {advice}", path=folder) from error
    if not is_empty:
        lacks = ", ".join(path.name for path in signs)
        raise PathNotFound(f"{folder} belongs to neither a run nor a node: it has none of {lacks}; {advice}", path=folder)


def place_of_node(state_dir: Path) -> RunPlace:
    """Location for a node, whether it is running or not."""
    config, output_dir, problem = config_path(state_dir), None, ""
    try:
        folder = read_path(training_output_path(state_dir))
        output_dir = folder if folder.is_dir() else None
    except OSError as error:
        problem = unreadable(training_output_path(state_dir), error)
    return RunPlace(output_dir, state_dir, config if config.is_file() else None, problem)


def read_summary(output_dir: Path | None) -> tuple[dict[str, Any] | None, str]:
    """The run's summary; None if the file is missing or unreadable. Also returns why it is unreadable."""
    if output_dir is None:
        return None, ""
    path = output_dir / "summary.json"
    try:
        return dict(json.loads(read_regular(path, max_bytes=_MAX_BYTES))), ""
    except (OSError, *MALFORMED) as error:
        return None, problem_of(path, error)


_PRESET = "train.algorithm"
_RUN_KEYS = ("train.dataset", "train.output_dir", "train.reward.function", _PRESET, "sft.dataset", "sft.output_dir")
_NAMED = ("state_dir", "device", "model.path", *_RUN_KEYS)
"""Keys without a default, or from which the defaults of others follow."""


def read_settings(output_dir: Path | None, config: NodeConfig | None) -> dict[str, Any]:
    """provenance: of run.json, by name. changed: keys without or with another than their default value. toml: every key."""
    found: dict[str, Any] = {"provenance": {}, "changed": [], "toml": ""}
    if output_dir is not None:
        try:
            head = json.loads(read_regular(output_dir / "run.json", max_bytes=_MAX_BYTES))
            given = {"run": head["id"], "begun at version": head["policy_version"], **head.get("provenance", {})}
            given |= {f"content of {name}": value for name, value in head["recipe"].items() if str(value).startswith("sha256:")}
            found["provenance"] = {name: str(value) for name, value in given.items()}
        except (OSError, *MALFORMED):
            pass  # from before the run, or of another version
    if config is not None:
        given, usual = (dict(leaves(table)) for table in (config.model_dump(mode="json", exclude_none=True), _usual(config)))
        usual[_PRESET] = TrainConfig.model_fields["algorithm"].default
        for key, value in given.items():
            is_named = key.startswith(_NAMED) and key != _PRESET
            if is_named or usual.get(key) != value:
                found["changed"].append(
                    {"key": key, "value": _told(value), "default": None if is_named else _told(usual.get(key))}
                )
        found["toml"] = "\n".join(toml_lines(config.model_dump(exclude_none=True), ()))
    return found


def _usual(config: NodeConfig) -> dict[str, Any]:
    """The defaults beside the keys without one; empty if they are no configuration by themselves."""
    table: dict[str, Any] = {}
    for key, value in leaves(config.model_dump(mode="json", exclude_none=True)):
        if key.startswith(_NAMED):
            put(table, key, value)
    try:
        return config_of(table).model_dump(mode="json", exclude_none=True)
    except TasukiError:
        return {}


def _told(value: object) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)
