"""Journal of the coordinator: intents and their results, in SQLite.

Rows are added and never changed: `stages` holds intents, `results` their outcomes. A stage without a result is one whose outcome no
coordinator learned. A commit is on disk before the call returns (WAL, synchronous=FULL; 0.2 ms), so calls need no thread. Only a
changeover's start, and a result by `done_before_next`, reach the disk with the next commit.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from tasuki.coordinator.journal_file import SCHEMA_VERSION, TABLES, check_version, id_number, id_text
from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.wire.errors import DiskFull, Interrupted, InvalidArgument, TasukiError
from tasuki.wire.stages import Phase, Stage, StageStatus

_MAX_NUMBER = 2**63 - 1
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


@dataclass(frozen=True, slots=True)
class Intent:
    """Stage command as recorded before it is sent."""

    id: int
    changeover_id: str
    stage: Stage
    is_undo: bool
    epoch: int
    sequence: int
    request_id: str
    time: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a stage. `answer`: data for a later stage; `policy_version`: the version published or received."""

    num_bytes: int = 0
    answer: bytes = b""
    policy_version: int | None = None


class Journal:
    """One node's journal. The caller holds the state folder's lock, so there is one writer.

    Methods that write raise DiskFull if they cannot, and have then written nothing. A result is kept, and written once there is room.
    """

    def __init__(self, path: Path, *, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        """Opens or creates the file. Raises DiskFull if it cannot be written, InvalidArgument if it is no regular file or no
        journal of this version."""
        self._path, self._failpoints = path, failpoints
        if path.exists() and not path.is_file():
            raise InvalidArgument("state_dir", f"{path} is no regular file; remove it, or choose another folder")
        with self._writing():
            self._db = sqlite3.connect(path, isolation_level=None)
            try:
                self._db.row_factory = sqlite3.Row
                check_version(self._db, path, key="state_dir", known=(0, SCHEMA_VERSION))
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(f"{TABLES}PRAGMA user_version = {SCHEMA_VERSION};")
            except BaseException as error:
                self._db.close()
                if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in _DAMAGED:
                    problem = f"{path} is damaged: {error}; move it elsewhere, or choose another folder"
                    raise InvalidArgument("state_dir", problem) from error
                raise
        self._syncs = True
        self._unwritten: list[tuple[object, ...]] = []
        self.epoch = 0
        self._sequence = 0
        self.is_on_disk = True
        """Whether every row has reached the disk."""

    def close(self) -> None:
        self._db.close()

    def begin_epoch(self, boot_id: str) -> int:
        """Begins an epoch higher than all before; its commands are numbered from 1."""
        self.epoch, self._sequence = self._insert("epochs", boot_id=boot_id, start_time=time.time()), 0
        return self.epoch

    def has_epoch(self, epoch: int) -> bool:
        """Whether the journal has this epoch, of any life of the coordinator."""
        return self._db.execute("SELECT 1 FROM epochs WHERE epoch = ?", (epoch,)).fetchone() is not None

    def begin_changeover(self, request_id: str, *, origin: Stage, target: Phase) -> str:
        """Records the start of a changeover from `origin` to `target`. Returns its id. On disk with its first intent, or its outcome."""
        with self._until_next_commit():
            places, now = {"origin": origin, "target": target}, time.time()
            return id_text(self._insert("changeovers", epoch=self.epoch, request_id=request_id, **places, start_time=now))

    def end_changeover(
        self,
        changeover_id: str,
        *,
        seconds: float,
        policy_version: int | None = None,
        error: TasukiError | None = None,
        status: StageStatus = StageStatus.FAILED,
    ) -> pb.Changeover:
        """Records the outcome of a changeover. Returns the completed record. status: with an error."""
        self._insert(
            "outcomes",
            number=id_number(changeover_id),
            status=status if error else StageStatus.DONE,
            policy_version=policy_version,
            seconds=seconds,
            error_reason=error.reason if error else "",
            error_message=error.message if error else "",
        )
        return self.changeovers(limit=1, before=id_number(changeover_id) + 1)[0]

    def intend(self, stage: Stage, changeover_id: str, *, is_undo: bool, trainer_boot_id: str, rollout_boot_id: str) -> Intent:
        """Records a stage before it is sent, and numbers it."""
        self._hit(f"{stage}.intend")
        sequence = self._sequence + 1  # used only once it is on disk, so an audit finds no gap
        request_id = f"{changeover_id}-{self.epoch}-{sequence}"
        now = time.time()
        row = self._insert(
            "stages",
            number=id_number(changeover_id),
            stage=stage,
            is_undo=is_undo,
            epoch=self.epoch,
            sequence=sequence,
            request_id=request_id,
            trainer_boot_id=trainer_boot_id,
            rollout_boot_id=rollout_boot_id,
            time=now,
        )
        self._sequence = sequence
        intent = Intent(row, changeover_id, stage, is_undo, self.epoch, sequence, request_id, now)
        try:
            self._hit(f"{stage}.intended")
        except DiskFull as error:
            self._unwritten.append((row, StageStatus.FAILED, now, 0.0, 0, b"", None, error.reason, error.message))
            raise
        return intent

    def pass_over(self, sequence: int) -> None:
        """Skips numbers up to `sequence`, which another caller has used in a service."""
        self._sequence = max(self._sequence, sequence)

    def done(self, intent: Intent, outcome: Outcome, *, seconds: float) -> pb.StageEvent:
        """Records that the stage or its undo was carried out."""
        return self._result(intent, StageStatus.UNDONE if intent.is_undo else StageStatus.DONE, outcome, seconds=seconds)

    def done_before_next(self, intent: Intent, outcome: Outcome, *, seconds: float) -> pb.StageEvent:
        """Same as `done`, but on disk with the next commit, which must follow at once. Report the event after that."""
        with self._until_next_commit():
            return self.done(intent, outcome, seconds=seconds)

    def failed(self, intent: Intent, error: TasukiError, *, seconds: float) -> pb.StageEvent:
        """Records that the stage or its undo was refused or failed."""
        return self._result(intent, StageStatus.FAILED, Outcome(), seconds=seconds, error=error)

    def unresolved(self) -> list[Intent]:
        """Intents without a result, oldest first: the work a coordinator left unfinished.

        Each intent is settled before the next, so these are the last rows.
        """
        self._write_results()
        rows = self._db.execute(
            "SELECT * FROM stages WHERE id > (SELECT coalesce(max(id), 0) FROM results) ORDER BY id"
        ).fetchall()
        places = ((row, (row["id"], id_text(row["number"]), Stage(row["stage"]), bool(row["is_undo"]))) for row in rows)
        return [Intent(*place, *(row[name] for name in ("epoch", "sequence", "request_id", "time"))) for row, place in places]

    def close_interrupted(self) -> str:
        """Ends changeovers left open by earlier epochs. Returns the error of the last changeover, empty if it succeeded."""
        rows = self._db.execute(
            "SELECT number FROM changeovers LEFT JOIN outcomes USING (number) WHERE status IS NULL ORDER BY number DESC"
        )
        for (number,) in rows.fetchall():
            name = id_text(number)
            error = Interrupted(f"the coordinator stopped in the middle of {name}", changeover_id=name)
            self.end_changeover(name, seconds=0.0, error=error)
        latest = self.latest()
        return f"{latest.error_reason}: {latest.error_message}" if latest is not None and latest.error_reason else ""

    def served_version(self, rollout_boot_id: str) -> int | None:
        """Last version served by this life of rollout."""
        row = self._db.execute(
            "SELECT policy_version FROM outcomes JOIN changeovers USING (number) WHERE status = ? AND target = ?"
            " AND number IN (SELECT number FROM stages WHERE rollout_boot_id = ?) ORDER BY number DESC LIMIT 1",
            (StageStatus.DONE, Phase.ROLLOUT, rollout_boot_id),
        ).fetchone()
        return row["policy_version"] if row else None

    def last(self, stage: Stage) -> Outcome | None:
        """Outcome of the last run of a stage; None if it failed, or no coordinator learned an answer.

        Of LOAD_WEIGHTS the version, and the answer that SYNC passes on; of SYNC the version, and checksums of what rollout received.
        """
        row = self._db.execute(
            "SELECT status, bytes, answer, policy_version FROM stages LEFT JOIN results USING (id)"
            " WHERE stage = ? AND NOT is_undo ORDER BY id DESC LIMIT 1",
            (stage,),
        ).fetchone()
        if row is None or row["status"] != StageStatus.DONE or not row["answer"]:
            return None
        return Outcome(row["bytes"], answer=row["answer"], policy_version=row["policy_version"])

    def fleet_epoch(self, name: str) -> tuple[int, int]:
        """Highest attempt of a fleet that commanded the node, and its highest epoch in that attempt; (0, 0) if none did."""
        query = "SELECT attempt, epoch FROM fleets WHERE name = ? ORDER BY attempt DESC, epoch DESC LIMIT 1"
        row = self._db.execute(query, (name,)).fetchone()
        return (row["attempt"], row["epoch"]) if row else (0, 0)

    def take_fleet_epoch(self, name: str, *, attempt: int, epoch: int) -> None:
        """Records that a later life of a fleet commands the node."""
        self._insert("fleets", name=name, attempt=attempt, epoch=epoch, time=time.time())

    def published_bytes(self, trainer_boot_id: str) -> int | None:
        """Bytes of the last LOAD_WEIGHTS of this life of the trainer; None if it has published nothing yet."""
        row = self._db.execute(
            "SELECT bytes FROM results JOIN stages USING (id) WHERE stage = ? AND status = ? AND trainer_boot_id = ?"
            " ORDER BY id DESC LIMIT 1",
            (Stage.LOAD_WEIGHTS, StageStatus.DONE, trainer_boot_id),
        ).fetchone()
        return row["bytes"] if row else None

    def find(self, request_id: str) -> pb.Changeover | None:
        """Changeover that a request began, in any epoch."""
        row = self._db.execute("SELECT number FROM changeovers WHERE request_id = ?", (request_id,)).fetchone()
        return self.changeovers(limit=1, before=int(row["number"]) + 1)[0] if row else None

    def latest(self) -> pb.Changeover | None:
        return next(iter(self.changeovers(limit=1)), None)

    def num_done(self) -> int:
        """Number of changeovers that reached their phase, over all epochs."""
        return int(self._db.execute("SELECT count(*) FROM outcomes WHERE status = ?", (StageStatus.DONE,)).fetchone()[0])

    def changeovers(self, *, limit: int, before: int | None = None) -> list[pb.Changeover]:
        """At most `limit` changeovers, newest first, numbered below `before`."""
        rows = self._db.execute(
            "SELECT * FROM changeovers LEFT JOIN outcomes USING (number) WHERE number < ? ORDER BY number DESC LIMIT ?",
            (_MAX_NUMBER if before is None else before, limit),
        ).fetchall()
        return [
            pb.Changeover(
                changeover_id=id_text(row["number"]),
                target=Phase(row["target"]).number,
                status=StageStatus(row["status"] or StageStatus.STARTED).number,
                start_time=timestamp(row["start_time"]),
                stages={event.stage: event for event in self.events(id_text(row["number"]))}.values(),  # the last of each
                **{name: row[name] for name in ("epoch", "policy_version", "seconds", "error_reason", "error_message")},
            )
            for row in rows
        ]

    def target_of(self, changeover_id: str) -> Phase:
        """Target phase of a changeover in this journal."""
        number = id_number(changeover_id)
        return Phase(self._db.execute("SELECT target FROM changeovers WHERE number = ?", (number,)).fetchone()["target"])

    def events(self, changeover_id: str) -> list[pb.StageEvent]:
        """Outcome of each intent of a changeover, in order."""
        rows = self._db.execute(
            "SELECT stage, status, coalesce(results.time, stages.time) AS time, seconds, bytes, error_reason, error_message"
            " FROM stages LEFT JOIN results USING (id) WHERE number = ? ORDER BY id",
            (id_number(changeover_id),),
        )
        return [
            pb.StageEvent(
                changeover_id=changeover_id,
                stage=Stage(row["stage"]).number,
                status=StageStatus(row["status"] or StageStatus.STARTED).number,
                time=timestamp(row["time"]),
                **{name: row[name] for name in ("seconds", "bytes", "error_reason", "error_message")},
            )
            for row in rows.fetchall()
        ]

    def _result(
        self, intent: Intent, status: StageStatus, outcome: Outcome, *, seconds: float, error: TasukiError | None = None
    ) -> pb.StageEvent:
        of_outcome = (outcome.num_bytes, outcome.answer, outcome.policy_version)
        of_error = (error.reason, error.message) if error else ("", "")
        self._unwritten.append((intent.id, status, time.time(), seconds, *of_outcome, *of_error))
        self._hit(f"{intent.stage}.note")
        self._write_results()
        self._hit(f"{intent.stage}.noted")
        return self.events(intent.changeover_id)[-1]

    def _insert(self, table: str, **columns: object) -> int:
        """Adds a row. Returns its id."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        row = self._write(f"INSERT INTO {table} ({names}) VALUES ({marks})", (*columns.values(),))  # noqa: S608 - our own names
        return int(row.lastrowid or 0)

    def _write(self, statement: str, values: Sequence[object]) -> sqlite3.Cursor:
        self._write_results()
        with self._writing():
            row = self._db.execute(statement, values)
        self.is_on_disk = self._syncs
        return row

    def _write_results(self) -> None:
        """Writes the results that found no room earlier; they come before any other row."""
        with self._writing():
            while self._unwritten:
                self._db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._unwritten[0])
                del self._unwritten[0]
                self.is_on_disk = self._syncs

    @contextmanager
    def _until_next_commit(self) -> Iterator[None]:
        """Commits in the block reach the file, and the disk with the next commit after it."""
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._syncs = False
        try:
            yield
        finally:
            self._db.execute("PRAGMA synchronous = FULL")
            self._syncs = True

    def _hit(self, failpoint: str) -> None:
        with self._writing():
            self._failpoints.hit(failpoint)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            raise DiskFull(
                f"the journal {self._path} cannot be written ({error}), so nothing is begun; make room on its disk, or make it writable, "
                "and ask again",
                path=self._path,
            ) from error


def timestamp(seconds: float) -> Timestamp:
    """seconds: since 1970."""
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def ending(changeover: pb.Changeover) -> pb.StageEvent:
    """Event that closes the changeover: no stage, with the status and seconds of the whole."""
    started = changeover.start_time.ToNanoseconds() * 1e-9
    return pb.StageEvent(
        changeover_id=changeover.changeover_id,
        status=changeover.status,
        time=timestamp(started + changeover.seconds),
        seconds=changeover.seconds,
        error_reason=changeover.error_reason,
        error_message=changeover.error_message,
    )
