"""The fleet's journal: a coordinator's journal, plus what was asked of each node and what was decided. Its audit replays it.

`stages` has a row for a stage on all nodes; `steps` has one per node and per read of a node. A decision is written before the first
stage that depends on it.
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tasuki.coordinator.history import Violation
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.journal_file import id_number, id_text, open_snapshot
from tasuki.fleet.rules import COMMIT, PREPARE, ROLLOUT, TO_TRAIN, Decision, Step, digest_of, place
from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.errors import TasukiError
from tasuki.wire.stages import RULES, Phase, Stage, StageStatus

_TABLES = """
CREATE TABLE IF NOT EXISTS attempts (
    epoch INTEGER PRIMARY KEY REFERENCES epochs,
    attempt INTEGER NOT NULL,
    num_nodes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL REFERENCES changeovers,
    node_rank INTEGER NOT NULL,
    step TEXT NOT NULL,
    epoch INTEGER NOT NULL REFERENCES epochs,
    time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS step_outcomes (
    id INTEGER PRIMARY KEY REFERENCES steps,
    place TEXT NOT NULL,
    policy_version INTEGER,
    weights_digest BLOB NOT NULL,
    error_reason TEXT NOT NULL,
    error_message TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY REFERENCES changeovers,
    policy_version INTEGER NOT NULL,
    weights_digest BLOB NOT NULL,
    last_step INTEGER NOT NULL,
    time REAL NOT NULL
);
"""


class FleetJournal(Journal):
    """The caller holds the state folder's lock, so there is one writer. All writes may raise DiskFull."""

    def __init__(self, path: Path, *, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        super().__init__(path, failpoints=failpoints)
        with self._writing():
            self._db.executescript(_TABLES)

    def begin_life(self, boot_id: str, *, attempt: int, num_nodes: int) -> int:
        """Starts a new epoch of the fleet in an attempt of the job."""
        epoch = self.begin_epoch(boot_id)
        self._insert("attempts", epoch=epoch, attempt=attempt, num_nodes=num_nodes)
        return epoch

    def begin_steps(self, step: Stage | Step, changeover_id: str, *, ranks: Sequence[int]) -> list[int]:
        """Records requests to nodes before they are sent, in one commit. Returns their ids."""
        row, now = (id_number(changeover_id), step, self.epoch), time.time()
        statement = "INSERT INTO steps (number, step, epoch, node_rank, time) VALUES (?, ?, ?, ?, ?)"
        self._hit(f"{step}.begin")
        with self._commit():
            ids = [int(self._db.execute(statement, (*row, rank, now)).lastrowid or 0) for rank in ranks]
        self._hit(f"{step}.begun")
        return ids

    def end_steps(self, outcomes: Mapping[int, NodeState | TasukiError]) -> None:
        """Records, by step, the nodes' states afterwards or their errors, in one commit."""
        self._hit("steps.end")
        with self._commit():
            rows = [(step_id, *_columns(outcome)) for step_id, outcome in outcomes.items()]
            self._db.executemany("INSERT INTO step_outcomes VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._hit("steps.ended")

    def note_states(self, changeover_id: str, states: Sequence[NodeState]) -> None:
        """Records the nodes' states, by rank, before anything is asked of them."""
        ids = self.begin_steps(Step.LOOK, changeover_id, ranks=range(len(states)))
        self.end_steps(dict(zip(ids, states, strict=True)))

    def decide(self, changeover_id: str, sums: WeightSums) -> Decision:
        """Records that all nodes will serve these weights. Returns once it is durable."""
        self._hit("decide")
        decision = Decision(id_number(changeover_id), sums.policy_version, digest_of(sums))
        self._write(
            "INSERT INTO decisions SELECT ?, ?, ?, (SELECT coalesce(max(id), 0) FROM steps), ?",
            (decision.number, decision.policy_version, decision.weights_digest, time.time()),
        )
        self._hit("decided")
        return decision

    def decision(self) -> Decision | None:
        """The decision in force: the last one, unless a changeover to TRAIN has begun since or the attempt has changed."""
        row = self._db.execute(
            "SELECT decisions.* FROM decisions JOIN changeovers USING (number) JOIN attempts USING (epoch)"
            " WHERE attempt = (SELECT attempt FROM attempts ORDER BY epoch DESC LIMIT 1)"
            " AND number > (SELECT coalesce(max(number), 0) FROM changeovers WHERE target = ?) ORDER BY number DESC LIMIT 1",
            (Phase.TRAIN,),
        ).fetchone()
        return None if row is None else Decision(row["number"], row["policy_version"], row["weights_digest"])

    def pending(self) -> Decision | None:
        """The decision in force, unless all nodes have served since."""
        decision = self.decision()
        served = (
            "SELECT 1 FROM outcomes JOIN changeovers USING (number) WHERE number >= ? AND target = ? AND status = ? LIMIT 1"
        )
        if decision is None or self._db.execute(served, (decision.number, Phase.ROLLOUT, StageStatus.DONE)).fetchone():
            return None
        return decision

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """Commits everything within, or nothing."""
        self._write_results()
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise


def _columns(outcome: NodeState | TasukiError) -> tuple[object, ...]:
    if isinstance(outcome, TasukiError):
        return "", None, b"", outcome.reason, outcome.message
    version = outcome.policy_version if outcome.HasField("policy_version") else None
    return place(outcome) or "", version, outcome.weights_digest, "", ""


_STAGES = frozenset(Stage)


class FleetInvariant(StrEnum):
    """Invariants of a fleet's journal."""

    LOOKED = "looked"  # A node is asked for a stage only if its place is known: nothing is resent blindly.
    RING = "ring"  # A stage follows its predecessor in the ring.
    # Before the decision, and towards TRAIN, a node starts a stage only once every node has finished the previous one.
    BARRIER = "barrier"
    COMPARED = "compared"  # A decision is made only once every node has received the decided weights.
    DECIDED = "decided"  # OFFLOAD and RESUME_KV follow the decision, on nodes that hold the decided weights.
    ONE_VERSION = "one-version"  # All serving nodes serve the last decided weights.
    FORWARD = "forward"  # After a decision, no node moves to TRAIN before every node has served.
    VERSIONS_GROW = "versions-grow"  # Within one attempt of the job, decided versions never decrease.


@dataclass(slots=True)
class FleetAudit:
    """Summary of a journal up to the first violation, if any. num_unanswered: steps without an answer, or with an error."""

    num_changeovers: int
    num_done: int
    num_steps: int
    num_unanswered: int
    num_decisions: int
    violation: Violation | None = None


def audit_fleet_journal(path: Path) -> FleetAudit:
    """Replays a journal. Raises PathNotFound, and InvalidArgument for a file that is not a fleet's journal."""
    with open_snapshot(path) as db:
        history = _read(db)
    found = FleetAudit(
        num_changeovers=len(history.changeovers),
        num_done=sum(changeover["is_done"] for changeover in history.changeovers.values()),
        num_steps=len(history.steps),
        num_unanswered=sum(step["place"] is None for step in history.steps),
        num_decisions=len(history.decisions),
    )
    try:
        _check_decisions(history)
        _Replay(history).run()
    except Violation as violation:
        found.violation = violation
    return found


@dataclass(frozen=True, slots=True)
class _History:
    """Rows of the journal, oldest first. changeovers: by number.

    A step's `place` is None without an outcome or with an error, and "" if the node did not know.
    """

    changeovers: dict[int, sqlite3.Row]
    steps: list[sqlite3.Row]
    decisions: list[sqlite3.Row]


def _read(db: sqlite3.Connection) -> _History:
    changeovers = (
        "SELECT number, target, attempt, num_nodes, coalesce(status, '') = ? AS is_done"
        " FROM changeovers JOIN attempts USING (epoch) LEFT JOIN outcomes USING (number)"
    )
    steps = (
        "SELECT id, number, node_rank AS rank, step, epoch, CASE error_reason WHEN '' THEN place END AS place,"
        " coalesce(weights_digest, x'') AS weights_digest FROM steps LEFT JOIN step_outcomes USING (id) ORDER BY id"
    )
    return _History(
        {row["number"]: row for row in db.execute(changeovers, (StageStatus.DONE,))},
        db.execute(steps).fetchall(),
        db.execute("SELECT * FROM decisions ORDER BY number").fetchall(),
    )


def _broken(invariant: FleetInvariant, expected: str, number: int, rank: int | None = None, stage: str = "") -> Violation:
    where = "" if rank is None else f"on node {rank} "
    named = Stage(stage) if stage in _STAGES else None
    return Violation(invariant, f"{where}{expected}, according to the fleet", id_text(number), named)


def _check_decisions(history: _History) -> None:
    highest: dict[int, int] = {}
    for decision in history.decisions:
        number, version = decision["number"], decision["policy_version"]
        attempt = history.changeovers[number]["attempt"]
        if version < highest.get(attempt, 0):
            expected = f"version {highest[attempt]} or later, found {version}"
            raise _broken(FleetInvariant.VERSIONS_GROW, expected, number)
        highest[attempt] = version
        for later in sorted(each for each in history.changeovers if each >= number):
            changeover = history.changeovers[later]
            if changeover["attempt"] != attempt or (changeover["target"] == Phase.ROLLOUT and changeover["is_done"]):
                break
            if changeover["target"] == Phase.TRAIN:
                raise _broken(FleetInvariant.FORWARD, f"every node to serve version {version} first", later)


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
    history: _History
    nodes: dict[int, _Node] = field(default_factory=dict)
    decision: sqlite3.Row | None = None

    def run(self) -> None:
        decisions = list(self.history.decisions)
        for step in self.history.steps:
            while decisions and decisions[0]["last_step"] < step["id"]:
                self._decide(decisions.pop(0))
            changeover = self.history.changeovers[step["number"]]
            if self.decision is not None:  # which ends with a move towards TRAIN, or another attempt
                decided = self.history.changeovers[self.decision["number"]]
                if changeover["target"] == Phase.TRAIN or changeover["attempt"] != decided["attempt"]:
                    self.decision = None
            if step["step"] in _STAGES:
                self._check_stage(step, Stage(step["step"]))
            self._apply(step)
        for decision in decisions:
            self._decide(decision)

    def _decide(self, decision: sqlite3.Row) -> None:
        number, version = decision["number"], decision["policy_version"]
        for rank in range(self.history.changeovers[number]["num_nodes"]):
            node = self.nodes.get(rank, _Node())
            if node.place != Stage.SYNC or node.weights_digest != decision["weights_digest"]:
                expected = f"node {rank} to have received the weights of version {version}, it is at {node.place}"
                raise _broken(FleetInvariant.COMPARED, expected, number, rank)
        self.decision = decision

    def _check_stage(self, step: sqlite3.Row, stage: Stage) -> None:
        def broken(invariant: FleetInvariant, expected: str) -> Violation:
            return _broken(invariant, expected, step["number"], step["rank"], step["step"])

        node, before = self.nodes.setdefault(step["rank"], _Node()), RULES[stage].after
        if node.epoch != step["epoch"] or not node.place:
            raise broken(FleetInvariant.LOOKED, "a look at the node first")
        if node.place != before:
            raise broken(FleetInvariant.RING, f"the node at {before}, it is at {node.place}")
        if stage in COMMIT and self.decision is None:
            raise broken(FleetInvariant.DECIDED, "a decision first")
        if stage in COMMIT and self.decision is not None and node.weights_digest != self.decision["weights_digest"]:
            raise broken(FleetInvariant.DECIDED, "the weights that were decided")
        if (stage in PREPARE and self.decision is None) or stage in TO_TRAIN:
            for rank, other in self.nodes.items():
                if other.place not in (before, stage) and other.begun is not stage:
                    raise broken(FleetInvariant.BARRIER, f"node {rank} at {before}, it is at {other.place}")

    def _apply(self, step: sqlite3.Row) -> None:
        begun = Stage(step["step"]) if step["step"] in _STAGES and step["place"] is None else None
        if step["place"] is None and step["step"] == Step.LOOK:
            begun = self.nodes.get(step["rank"], _Node()).begun
        self.nodes[step["rank"]] = _Node(step["place"], step["weights_digest"], step["epoch"], begun)
        if step["place"] == ROLLOUT and self.decision is not None and step["weights_digest"] != self.decision["weights_digest"]:
            expected = f"version {self.decision['policy_version']} as the one that is served"
            raise _broken(FleetInvariant.ONE_VERSION, expected, step["number"], step["rank"], step["step"])
