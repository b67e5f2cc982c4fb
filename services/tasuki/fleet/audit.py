"""Replays a fleet's journal and reports the first broken invariant. The nodes' own actions are audited from their journals."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from tasuki.coordinator.journal_reader import open_journal
from tasuki.coordinator.records import Status, id_text
from tasuki.fleet.rules import COMMIT, PREPARE, ROLLOUT, TO_TRAIN, Step
from tasuki.memory.stages import RULES, Phase, Stage
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular

_Row = TypeVar("_Row")
_STAGES = frozenset(Stage)


class FleetInvariant(StrEnum):
    """Invariants of a fleet's journal."""

    LOOKED = "looked"
    """A node is asked for a stage only if its place is known: nothing is resent blindly."""
    RING = "ring"
    """A stage follows its predecessor in the ring."""
    BARRIER = "barrier"
    """Before the decision, and towards TRAIN, a node starts a stage only once every node has finished the previous one."""
    COMPARED = "compared"
    """A decision is made only once every node has received the decided weights."""
    DECIDED = "decided"
    """OFFLOAD and RESUME_KV follow the decision, on nodes that hold the decided weights."""
    ONE_VERSION = "one-version"
    """All serving nodes serve the last decided weights."""
    FORWARD = "forward"
    """After a decision, no node moves to TRAIN before every node has served."""
    VERSIONS_GROW = "versions-grow"
    """Within one attempt of the job, decided versions never decrease."""


@dataclass(frozen=True, slots=True)
class FleetViolation:
    """The first violation found."""

    invariant: FleetInvariant
    expected: str
    changeover_id: str = ""
    node_rank: int | None = None
    stage: str = ""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of `steps` with its result. place: None without a result or with an error; "" if the node did not know."""

    id: int
    number: int
    rank: int
    step: str
    epoch: int
    place: str | None
    weights_digest: bytes


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A row of `decisions`."""

    number: int
    policy_version: int
    weights_digest: bytes
    last_step: int


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """A fleet's journal. attempts: by epoch, with the number of nodes. changeovers: (target, epoch, whether done) by number."""

    attempts: dict[int, tuple[int, int]]
    changeovers: dict[int, tuple[Phase, int, bool]]
    steps: tuple[StepRow, ...]
    decisions: tuple[DecisionRow, ...]


@dataclass(slots=True)
class FleetAudit:
    """Summary of a journal up to the first violation, if any."""

    num_epochs: int = 0
    num_changeovers: int = 0
    num_done: int = 0
    num_steps: int = 0
    num_unanswered: int = 0
    num_decisions: int = 0
    violation: FleetViolation | None = None


def read_fleet_history(path: Path) -> FleetHistory:
    """Reads the journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is not a fleet's journal."""
    with named_if_denied(path, key="journal"):
        if not path.is_file():
            raise PathNotFound(f"there is no journal at {path}", path=path)
        open_regular(path).close()  # SQLite's error for a denied file is that of a missing one
    try:
        with open_journal(path) as db:
            db.execute("BEGIN")  # one snapshot of all tables
            return _read(db)
    except (sqlite3.Error, OSError, ValueError) as error:
        raise InvalidArgument("journal", f"{path} cannot be read as a fleet's: {error}", path=path) from error


def _read(db: sqlite3.Connection) -> FleetHistory:
    def rows(query: str, make: Callable[[sqlite3.Row], _Row]) -> tuple[_Row, ...]:
        return tuple(make(row) for row in db.execute(query))

    changeovers = "SELECT number, target, epoch, status FROM changeovers LEFT JOIN outcomes USING (number)"
    steps = "SELECT * FROM steps LEFT JOIN step_results USING (id) ORDER BY id"
    return FleetHistory(
        attempts={row["epoch"]: (row["attempt"], row["num_nodes"]) for row in db.execute("SELECT * FROM attempts")},
        changeovers={
            row["number"]: (Phase(row["target"]), row["epoch"], row["status"] == Status.DONE) for row in db.execute(changeovers)
        },
        steps=rows(steps, _step),
        decisions=rows(
            "SELECT * FROM decisions ORDER BY number",
            lambda row: DecisionRow(row["number"], row["policy_version"], row["weights_digest"], row["last_step"]),
        ),
    )


def _step(row: sqlite3.Row) -> StepRow:
    place = None if row["place"] is None or row["error_reason"] else row["place"]
    digest = row["weights_digest"] or b""
    return StepRow(row["id"], row["number"], row["node_rank"], row["step"], row["epoch"], place, digest)


def audit_fleet(history: FleetHistory) -> FleetAudit:
    """Replays the history to its end or the first violation."""
    found = FleetAudit(
        num_epochs=len(history.attempts),
        num_changeovers=len(history.changeovers),
        num_done=sum(done for _, _, done in history.changeovers.values()),
        num_steps=len(history.steps),
        num_unanswered=sum(step.place is None for step in history.steps),
        num_decisions=len(history.decisions),
    )
    try:
        _check_decisions(history)
        _Replay(history).run()
    except _Broken as broken:
        found.violation = broken.violation
    return found


class _Broken(Exception):
    def __init__(self, violation: FleetViolation) -> None:
        super().__init__(violation.expected)
        self.violation = violation


def _check_decisions(history: FleetHistory) -> None:
    highest: dict[int, int] = {}
    for decision in history.decisions:
        attempt = history.attempts[history.changeovers[decision.number][1]][0]
        if decision.policy_version < highest.get(attempt, 0):
            expected = f"version {highest[attempt]} or later, found {decision.policy_version}"
            raise _Broken(FleetViolation(FleetInvariant.VERSIONS_GROW, expected, id_text(decision.number)))
        highest[attempt] = decision.policy_version
        _check_forward(history, decision, attempt=attempt)


def _check_forward(history: FleetHistory, decision: DecisionRow, *, attempt: int) -> None:
    for number in sorted(number for number in history.changeovers if number >= decision.number):
        target, epoch, is_done = history.changeovers[number]
        if history.attempts[epoch][0] != attempt or (target is Phase.ROLLOUT and is_done):
            return
        if target is Phase.TRAIN:
            expected = f"every node to serve version {decision.policy_version} first"
            raise _Broken(FleetViolation(FleetInvariant.FORWARD, expected, id_text(number)))


@dataclass(slots=True)
class _Node:
    """A node's known place; None if unknown. epoch: of the fleet that knows it."""

    place: str | None = None
    weights_digest: bytes = b""
    epoch: int = 0
    begun: Stage | None = None
    """A stage requested but not answered, which it may have reached."""


@dataclass(slots=True)
class _Replay:
    history: FleetHistory
    nodes: dict[int, _Node] = field(default_factory=dict)
    decision: DecisionRow | None = None

    def run(self) -> None:
        decisions = list(self.history.decisions)
        for step in self.history.steps:
            while decisions and decisions[0].last_step < step.id:
                self._decide(decisions.pop(0))
            self._take_over(step)
            if step.step in _STAGES:
                self._check_stage(step, Stage(step.step))
            self._apply(step)
            self._check_served(step)
        for decision in decisions:
            self._decide(decision)

    def _take_over(self, step: StepRow) -> None:
        """Ends a decision when the nodes move towards TRAIN or another attempt begins."""
        target, epoch, _ = self.history.changeovers[step.number]
        if self.decision is not None:
            decided_in = self.history.attempts[self.history.changeovers[self.decision.number][1]][0]
            if target is Phase.TRAIN or self.history.attempts[epoch][0] != decided_in:
                self.decision = None

    def _decide(self, decision: DecisionRow) -> None:
        num_nodes = self.history.attempts[self.history.changeovers[decision.number][1]][1]
        for rank in range(num_nodes):
            node = self.nodes.get(rank, _Node())
            if node.place != Stage.SYNC or node.weights_digest != decision.weights_digest:
                expected = (
                    f"node {rank} to have received the weights of version {decision.policy_version}, it is at {node.place}"
                )
                raise _Broken(FleetViolation(FleetInvariant.COMPARED, expected, id_text(decision.number), rank))
        self.decision = decision

    def _check_stage(self, step: StepRow, stage: Stage) -> None:
        node, before = self.nodes.setdefault(step.rank, _Node()), RULES[stage].after
        if node.epoch != step.epoch or not node.place:
            raise self._broken(step, FleetInvariant.LOOKED, "a look at the node first")
        if node.place != before:
            raise self._broken(step, FleetInvariant.RING, f"the node at {before}, it is at {node.place}")
        if stage in COMMIT:
            if self.decision is None:
                raise self._broken(step, FleetInvariant.DECIDED, "a decision first")
            if node.weights_digest != self.decision.weights_digest:
                raise self._broken(step, FleetInvariant.DECIDED, "the weights that were decided")
        if (stage in PREPARE and self.decision is None) or stage in TO_TRAIN:
            for rank, other in self.nodes.items():
                if other.place not in (before, stage) and other.begun is not stage:
                    raise self._broken(step, FleetInvariant.BARRIER, f"node {rank} at {before}, it is at {other.place}")

    def _apply(self, step: StepRow) -> None:
        begun = Stage(step.step) if step.step in _STAGES and step.place is None else None
        if step.place is None and step.step == Step.LOOK:
            begun = self.nodes.get(step.rank, _Node()).begun
        self.nodes[step.rank] = _Node(step.place, step.weights_digest, step.epoch, begun)

    def _check_served(self, step: StepRow) -> None:
        node = self.nodes[step.rank]
        if node.place == ROLLOUT and self.decision is not None and node.weights_digest != self.decision.weights_digest:
            raise self._broken(
                step, FleetInvariant.ONE_VERSION, f"version {self.decision.policy_version} as the one that is served"
            )

    def _broken(self, step: StepRow, invariant: FleetInvariant, expected: str) -> _Broken:
        return _Broken(FleetViolation(invariant, expected, id_text(step.number), step.rank, step.step))


def audit_fleet_journal(path: Path) -> FleetAudit:
    """Reads and replays a journal. Raises as `read_fleet_history`."""
    return audit_fleet(read_fleet_history(path))
