"""A whole journal as values, its invariants, whether any of its rows are missing, and what it tells of the services.

It is read without writing to it: of a running node, of one that ended, or of a copy.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from tasuki.coordinator.journal import Intent
from tasuki.coordinator.journal_file import id_number, id_text, open_snapshot
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.wire.errors import StaleSequence
from tasuki.wire.stages import RING, RULES, Phase, Rpc, Service, Stage, StageStatus, allowed_after, stages_of

_Row = TypeVar("_Row")


class Invariant(StrEnum):
    """Promise that every journal and log must keep. docs/reference/audit.md explains each."""

    NUMBERS_GROW = "numbers-grow"
    ONE_OPEN = "one-open-changeover"
    ONE_RESULT = "one-result"
    SETTLED = "intents-settled"
    ORIGIN = "origin"
    RING = "ring"
    UNDO = "undo"
    ONE_HOLDER = "one-holder"
    SYNC = "sync-of-published"
    SERVED = "served-after-sync"
    VERSIONS_GROW = "versions-grow"
    TARGET = "target"
    EXECUTED_ONCE = "executed-once"
    EXECUTED_IN_ORDER = "executed-in-order"
    AS_ASKED = "executed-as-asked"
    NONE_MISSING = "none-missing"
    LIVES_IN_ORDER = "lives-in-order"
    TRAINED_ONCE = "trained-once"


@dataclass(slots=True)
class Violation(Exception):
    """First breach found; raised to end a replay. `stage`, `epoch` and `sequence` are None if it concerns no single command."""

    invariant: StrEnum
    expected: str
    changeover_id: str = ""
    stage: Stage | None = None
    epoch: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeoverRecord:
    """A row of `changeovers` with its outcome. status: None while it is open."""

    id: str
    epoch: int
    origin: Stage
    target: Phase
    status: StageStatus | None
    policy_version: int | None
    error_reason: str

    def breaks(self, invariant: Invariant, expected: str) -> Violation:
        return Violation(invariant, expected, self.id, epoch=self.epoch)


@dataclass(frozen=True, slots=True)
class StageRecord(Intent):
    """A stage's intent with its result. boot_ids: of the services, as last observed before it.

    status: None without a result. is_settled: it was inferred from the services' later state, and is no answer.
    """

    boot_ids: dict[Service, str]
    status: StageStatus | None
    policy_version: int | None
    error_reason: str
    is_settled: bool

    def breaks(self, invariant: Invariant, expected: str) -> Violation:
        return Violation(invariant, expected, self.changeover_id, self.stage, self.epoch, self.sequence)


@dataclass(frozen=True, slots=True)
class History:
    """Contents of a journal, in the order written. A row with two outcomes is there twice."""

    epochs: tuple[int, ...]
    changeovers: tuple[ChangeoverRecord, ...]
    stages: tuple[StageRecord, ...]
    lost_results: tuple[int, ...]
    """Results without an intent."""
    lost_endings: tuple[str, ...]
    """Outcomes without a changeover, by its id."""
    highest: dict[str, int] = field(default_factory=dict)
    """Last number given in each table, by table name, from SQLite's own count."""
    loads: tuple["LoadRecord", ...] = ()


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """A checkpoint that the trainer loaded. changeover_id: of the first one that published weights from it."""

    changeover_id: str
    policy_version: int
    path: str


def read_history(path: Path) -> History:
    """Reads the journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is no journal of this version."""
    with open_snapshot(path) as db:

        def rows(query: str, make: Callable[[sqlite3.Row], _Row]) -> tuple[_Row, ...]:
            return tuple(make(row) for row in db.execute(query))

        return History(
            epochs=rows("SELECT epoch FROM epochs ORDER BY epoch", lambda row: _number(row, "epoch")),
            changeovers=rows("SELECT * FROM changeovers LEFT JOIN outcomes USING (number) ORDER BY number", _changeover),
            stages=rows(
                "SELECT stages.*, status, seconds, policy_version, error_reason FROM stages LEFT JOIN results USING (id) ORDER BY id",
                _stage,
            ),
            lost_results=rows(
                "SELECT id FROM results WHERE id NOT IN (SELECT id FROM stages) ORDER BY id", lambda row: _number(row, "id")
            ),
            lost_endings=rows(
                "SELECT number FROM outcomes WHERE number NOT IN (SELECT number FROM changeovers) ORDER BY number",
                lambda row: id_text(_number(row, "number")),
            ),
            loads=_loads(
                rows(
                    "SELECT number, answer FROM stages JOIN results USING (id) WHERE stage = 'LOAD_WEIGHTS' ORDER BY id", _load
                )
            ),
            highest=dict(rows("SELECT * FROM sqlite_sequence", lambda row: (_text(row, "name"), _number(row, "seq")))),
        )


def _changeover(row: sqlite3.Row) -> ChangeoverRecord:
    number, epoch = _number(row, "number"), _number(row, "epoch")
    return ChangeoverRecord(id_text(number), epoch, Stage(row["origin"]), Phase(row["target"]), *_outcome(row))


def _stage(row: sqlite3.Row) -> StageRecord:
    status, version, reason = _outcome(row)
    place = _number(row, "id"), id_text(_number(row, "number")), Stage(row["stage"]), bool(_number(row, "is_undo"))
    command = _number(row, "epoch"), _number(row, "sequence"), _text(row, "request_id"), row["time"]
    boot_ids = {service: _text(row, f"{service}_boot_id") for service in Service}
    # Written so by `resolve_intents`; a real answer takes time.
    return StageRecord(*place, *command, boot_ids, status, version, reason, is_settled=row["seconds"] == 0.0)


def _load(row: sqlite3.Row) -> LoadRecord | None:
    try:
        loaded = PublishedWeights.FromString(row["answer"]).loaded
    except (DecodeError, TypeError) as error:
        raise ValueError("no answer of LOAD_WEIGHTS, where one belongs") from error
    return LoadRecord(id_text(_number(row, "number")), loaded.policy_version, loaded.path) if loaded.path else None


def _loads(published: Sequence[LoadRecord | None]) -> tuple[LoadRecord, ...]:
    """The first record of each load."""
    first = dict[tuple[str, int], LoadRecord]()
    for load in filter(None, published):
        first.setdefault((load.path, load.policy_version), load)
    return (*first.values(),)


def _outcome(row: sqlite3.Row) -> tuple[StageStatus | None, int | None, str]:
    """Status, policy version and reason of an error."""
    if row["status"] is None:
        return None, None, ""
    version = None if row["policy_version"] is None else _number(row, "policy_version")
    return StageStatus(row["status"]), version, _text(row, "error_reason")


def _number(row: sqlite3.Row, column: str) -> int:
    """Checks a numeric column, since SQLite stores values of any type. Raises ValueError."""
    if not isinstance(value := row[column], int):
        raise ValueError(f"{value!r} as {column}, where a number belongs")
    return value


def _text(row: sqlite3.Row, column: str) -> str:
    if not isinstance(value := row[column], str):
        raise ValueError(f"{value!r} as {column}, where a text belongs")
    return value


def check_gaps(history: History) -> None:
    """Raises Violation at the first missing number, or where a life of a service comes back after another."""
    _check_none_missing("epochs", history.epochs, history, name=lambda number: f"epoch {number}")
    changeovers = [id_number(changeover.id) for changeover in history.changeovers]
    _check_none_missing("changeovers", changeovers, history, name=id_text)
    _check_none_missing("stages", [intent.id for intent in history.stages], history, name=lambda number: f"intent {number}")
    passed_over = {stage.id for stage in history.stages if stage.error_reason == StaleSequence.reason}
    epoch, sequence = 0, 0
    for intent in history.stages:
        sequence = sequence + 1 if intent.epoch == epoch else 1
        # Another caller used numbers in a service: the coordinator continues after those.
        if intent.sequence != sequence and not (sequence > 1 and intent.id - 1 in passed_over):
            raise intent.breaks(Invariant.NONE_MISSING, f"sequence {sequence}, found {intent.sequence}")
        epoch, sequence = intent.epoch, intent.sequence
    for service in Service:
        now, over = "", set[str]()
        for intent in history.stages:
            boot_id = intent.boot_ids[service]
            if boot_id in over:
                raise intent.breaks(Invariant.LIVES_IN_ORDER, f"{service} with boot id {now}, which came after {boot_id}")
            if boot_id and boot_id != now:
                over |= {now} - {""}
                now = boot_id


def _check_none_missing(table: str, numbers: Sequence[int], history: History, *, name: Callable[[int], str]) -> None:
    """Checks that rows are numbered from 1 without a gap; the number of a row that failed to write is reused."""
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            raise Violation(Invariant.NONE_MISSING, f"{name(expected)}, found {name(number)} in its place")
    if (highest := history.highest.get(table, 0)) > len(numbers):
        text = f"{name(len(numbers) + 1)}, since the journal has numbered {table} up to {highest}"
        raise Violation(Invariant.NONE_MISSING, text)


_At = Stage | None
"""Last stage that a service reports as completed; None: freshly started."""


_Moves = Mapping[_At, _At]
"""Stage that a command leads to, by each stage at which it is accepted."""


def _runs(stage: Stage) -> _Moves:
    """Moves of a stage. A poisoned rollout releases memory from any stage."""
    rule = RULES[stage]
    gives_up = rule.service is Service.ROLLOUT and rule.rpc is Rpc.PAUSE
    return {at: stage for at in (None, *stages_of(rule.service)) if gives_up or stage in allowed_after(rule.service, at)}


_RUNS = {stage: _runs(stage) for stage in Stage}
_WITHDRAWN: _Moves = {None: None, Stage.LOAD_WEIGHTS: Stage.LOAD_TRAINER, Stage.LOAD_TRAINER: Stage.LOAD_TRAINER}
_UNDOS = {rule.stage: _RUNS[rule.undo] if isinstance(rule.undo, Stage) else _WITHDRAWN for rule in RING if rule.undo_command}


def moves_of(intent: StageRecord) -> _Moves:
    """Moves of an intent's command; none for the undo of SYNC or PAUSE_KV, which are undone with another stage."""
    return _UNDOS.get(intent.stage, {}) if intent.is_undo else _RUNS[intent.stage]


@dataclass(slots=True)
class PossibleStages:
    """One service, as far as the journal shows."""

    boot_id: str = ""
    is_absent: bool = False
    """Whether it was silent at the coordinator's last look, which then says nothing about it."""
    at: set[_At] = field(default_factory=lambda: {None})
    at_if_new: set[_At] = field(default_factory=lambda: {None})
    """Possible stages if it restarted since its boot id was last observed."""
    unknown: list[_Moves] = field(default_factory=list)
    """Commands without an answer, which may run until the service answers a later one."""

    def may_be(self) -> set[_At]:
        stages = set(self.at)
        for moves in self.unknown:
            stages |= _moved(stages, moves)
        return stages

    def seen(self, boot_id: str) -> None:
        """Records an observed boot id; empty if the service was silent and counts as freshly started."""
        self.is_absent = not boot_id
        if not boot_id:
            self.at = self.may_be() | self.at_if_new
        elif boot_id != self.boot_id:
            self.at = self.at | self.at_if_new if not self.boot_id else set(self.at_if_new)
            self.boot_id, self.unknown = boot_id, []
            self.at_if_new = {None}

    def carried_out(self, moves: _Moves) -> bool:
        """Records that the service reported success. Returns False if that is impossible."""
        if not moves:
            return True
        self.at = _moved(self.may_be(), moves)
        self.at_if_new = _moved(self.at_if_new, moves) | {None}
        self.unknown = []
        return bool(self.at)

    def refused(self, moves: _Moves, *, is_out_of_order: bool) -> None:
        """Records that the service reported a refusal; earlier commands have ended.

        is_out_of_order: the command did not fit the service's stage: it restarted, unless a possible stage explains it.
        """
        if not moves:
            return
        self.at, self.unknown = self.may_be(), []
        if is_out_of_order:
            self.at = {at for at in self.at if at not in moves} or self.at | self.at_if_new

    def not_heard(self, moves: _Moves) -> None:
        """Records a lost answer: the command may have run, or may still run."""
        self.unknown.append(moves)
        self.at_if_new = self.at_if_new | _moved(self.at_if_new, moves)


def _moved(stages: set[_At], moves: _Moves) -> set[_At]:
    return {moves[at] for at in stages if at in moves}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights held by one life of a service. boot_id: of that life. version: None if its answer was lost."""

    boot_id: str
    version: int | None
    epoch: int


@dataclass(slots=True)
class WeightsTrace:
    """Path of the weights from trainer to rollout. Methods may raise Violation."""

    num_rewinds: int = 0
    versions: set[int] = field(default_factory=set)
    """All that were served."""
    held: _Weights | None = None
    """What rollout holds."""
    _published: _Weights | None = None
    _last: _Weights | None = None
    """Latest publication with a version, even if withdrawn since."""
    _served: dict[str, int] = field(default_factory=dict)
    """Latest version by rollout's boot id."""

    def carried_out(self, intent: StageRecord) -> None:
        match (intent.stage, intent.is_undo):
            case (Stage.LOAD_WEIGHTS, False):
                self._publish(intent)
            case (Stage.LOAD_WEIGHTS, True) | (Stage.LOAD_TRAINER, False):
                self._published = None
            case (Stage.OFFLOAD, True) if not intent.is_settled:
                self._published = None
            case (Stage.SYNC, False):
                self._receive(intent)
            case (Stage.PAUSE_WEIGHTS, False) | (Stage.RESUME_WEIGHTS, True):
                self.held = None
            case (Stage.RESUME_KV, False) | (Stage.DRAIN, True):
                self._serve(intent)

    def not_heard(self, intent: StageRecord) -> None:
        """Handles a lost answer: the stage may or may not have run."""
        if intent.stage is Stage.SYNC and not intent.is_undo and self._published is not None:
            self.held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _publish(self, intent: StageRecord) -> None:
        weights, last = _Weights(intent.boot_ids[Service.TRAINER], intent.policy_version, intent.epoch), self._last
        if weights.version is not None and last is not None and last.version is not None and weights.version < last.version:
            if weights.boot_id == last.boot_id or weights.epoch == last.epoch:
                expected = f"version {last.version} or a later one published, found {weights.version}"
                raise intent.breaks(Invariant.VERSIONS_GROW, expected)
            self.num_rewinds += 1
        self._published = weights
        if weights.version is not None:
            self._last = weights

    def _receive(self, intent: StageRecord) -> None:
        boot_id, version = intent.boot_ids[Service.TRAINER], intent.policy_version
        if self._published is None or self._published.boot_id != boot_id:
            expected = f"LOAD_WEIGHTS of the trainer with boot id {boot_id or 'unknown'} before it"
            raise intent.breaks(Invariant.SYNC, expected)
        if version is not None and version != self._published.version:
            expected = f"version {self._published.version}, which is published, found {version}"
            raise intent.breaks(Invariant.SYNC, expected)
        self.held = _Weights(intent.boot_ids[Service.ROLLOUT], self._published.version, intent.epoch)

    def _serve(self, intent: StageRecord) -> None:
        boot_id = intent.boot_ids[Service.ROLLOUT]
        if self.held is None or self.held.boot_id != boot_id:
            expected = f"SYNC into the rollout with boot id {boot_id or 'unknown'} before it"
            raise intent.breaks(Invariant.SERVED, expected)
        if (version := self.held.version) is None:
            return
        if version < self._served.get(boot_id, 0):
            expected = f"version {self._served[boot_id]} or a later one, found {version}"
            raise intent.breaks(Invariant.VERSIONS_GROW, expected)
        self._served[boot_id] = version
        self.versions.add(version)
