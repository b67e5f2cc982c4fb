"""The fleet's journal: a coordinator's journal, plus what was asked of each node and what was decided.

`stages` has a row for a stage on all nodes; `steps` has one per node and per read of a node. A decision is written before the first
stage that depends on it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.records import Intent, Status, id_number
from tasuki.fleet.records import Decision, NodeView, Sums
from tasuki.fleet.rules import Step
from tasuki.memory.stages import Phase, Stage
from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.wire.errors import TasukiError

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLES = """
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
CREATE TABLE IF NOT EXISTS step_results (
    id INTEGER PRIMARY KEY REFERENCES steps,
    place TEXT NOT NULL,
    policy_version INTEGER,
    weights_digest BLOB NOT NULL,
    seconds REAL NOT NULL,
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


@dataclass(frozen=True, slots=True)
class StepIntent:
    """A row of `steps`."""

    id: int
    rank: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `view`: of the node afterwards; None if it failed."""

    intent: StepIntent
    seconds: float
    view: NodeView | None = None
    error: TasukiError | None = None


class FleetJournal(Journal):
    """The caller holds the state folder's lock, so there is one writer. All writes may raise DiskFull."""

    def __init__(self, path: Path, *, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        super().__init__(path, failpoints=failpoints)
        with self._writing():
            self._db.executescript(TABLES)

    def begin_life(self, boot_id: str, *, attempt: int, num_nodes: int) -> int:
        """Starts a new epoch of the fleet in an attempt of the job."""
        epoch = self.begin_epoch(boot_id)
        self._write("INSERT INTO attempts VALUES (?, ?, ?)", (epoch, attempt, num_nodes))
        return epoch

    def intend_everywhere(self, stage: Stage, changeover_id: str, *, num_nodes: int) -> tuple[Intent, list[StepIntent]]:
        """Records a stage to run on every node, before it is sent to any."""
        intent = self.intend(stage, changeover_id, is_undo=False, trainer_boot_id="", rollout_boot_id="")
        return intent, self.begin_steps(stage, changeover_id, ranks=range(num_nodes))

    def note_views(self, changeover_id: str, views: Sequence[NodeView]) -> None:
        """Records the nodes' places before anything is asked of them."""
        steps = self.begin_steps(Step.LOOK, changeover_id, ranks=[view.rank for view in views])
        self.end_steps([StepResult(step, 0.0, view=view) for step, view in zip(steps, views, strict=True)])

    def begin_steps(self, step: Stage | Step, changeover_id: str, *, ranks: Sequence[int]) -> list[StepIntent]:
        """Records requests to nodes, in one commit."""
        row, now = (id_number(changeover_id), step, self.epoch), time.time()
        statement = "INSERT INTO steps (number, step, epoch, node_rank, time) VALUES (?, ?, ?, ?, ?)"
        self._hit(f"{step}.begin")
        with self._commit() as db:
            intents = [StepIntent(int(db.execute(statement, (*row, rank, now)).lastrowid or 0), rank) for rank in ranks]
        self._hit(f"{step}.begun")
        return intents

    def end_steps(self, results: Sequence[StepResult]) -> None:
        """Records results of steps, in one commit."""
        self._hit("steps.end")
        with self._commit() as db:
            db.executemany("INSERT INTO step_results VALUES (?, ?, ?, ?, ?, ?, ?)", map(_result_row, results))
        self._hit("steps.ended")

    def decide(self, changeover_id: str, sums: Sums) -> Decision:
        """Records that all nodes will serve these weights. Returns once it is durable."""
        self._hit("decide")
        values = (id_number(changeover_id), sums.policy_version, sums.digest, time.time())
        self._write(
            "INSERT INTO decisions SELECT ?, ?, ?, (SELECT coalesce(max(id), 0) FROM steps), ?",
            values,
        )
        self._hit("decided")
        return Decision(id_number(changeover_id), sums.policy_version, sums.digest)

    def decision(self) -> Decision | None:
        """The decision in force: the last one, unless a changeover to TRAIN has begun since or the attempt has changed."""
        row = self._db.execute(
            "SELECT decisions.* FROM decisions JOIN changeovers USING (number) JOIN attempts USING (epoch)"
            " WHERE attempt = (SELECT attempt FROM attempts ORDER BY epoch DESC LIMIT 1)"
            " AND number > (SELECT coalesce(max(number), 0) FROM changeovers WHERE target = ?) ORDER BY number DESC LIMIT 1",
            (Phase.TRAIN,),
        ).fetchone()
        return None if row is None else Decision(row["number"], row["policy_version"], row["weights_digest"])

    def is_carried_out(self, decision: Decision) -> bool:
        """Whether all nodes have served since the decision."""
        row = self._db.execute(
            "SELECT 1 FROM outcomes JOIN changeovers USING (number) WHERE number >= ? AND target = ? AND status = ? LIMIT 1",
            (decision.number, Phase.ROLLOUT, Status.DONE),
        ).fetchone()
        return row is not None

    @contextmanager
    def _commit(self) -> Iterator[sqlite3.Connection]:
        """A transaction."""
        self._write_results()
        with self._writing():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise


def _result_row(result: StepResult) -> tuple[object, ...]:
    view, error = result.view, result.error
    place = "" if view is None or view.at is None else view.at
    version, digest = (None, b"") if view is None else (view.policy_version, view.weights_digest)
    reason, message = ("", "") if error is None else (error.reason, error.message)
    return (result.intent.id, place, version, digest, result.seconds, reason, message)
