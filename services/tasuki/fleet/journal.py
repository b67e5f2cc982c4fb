"""The fleet's journal: a coordinator's journal, plus what was asked of each node and what was decided.

`stages` has a row for a stage on all nodes; `steps` has one per node and per read of a node. A decision is written before the first
stage that depends on it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.journal_file import id_number
from tasuki.fleet.rules import Decision, Step, digest_of, place
from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.errors import TasukiError
from tasuki.wire.stages import Phase, Stage, StageStatus

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
