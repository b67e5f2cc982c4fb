"""A journal as the dashboard reads it: beside its writer, damaged, long; changeovers with their failures."""

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.coordinator.journal import Journal, Outcome
from tasuki.coordinator.journal_file import open_journal
from tasuki.dashboard.journal import JournalTail, page
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import HOLDS, Phase, Stage
from tests.limits import limit_s

RECORDED = Path(__file__).parents[1] / "recorded_run"


def write_changeover(journal: Journal, request_id: str) -> None:
    changeover = journal.begin_changeover(request_id, origin=HOLDS[Phase.TRAIN], target=Phase.ROLLOUT)
    intent = journal.intend(Stage.LOAD_WEIGHTS, changeover, is_undo=False, trainer_boot_id="t1", rollout_boot_id="r1")
    journal.done(intent, Outcome(), seconds=0.25)
    journal.end_changeover(changeover, seconds=0.5)


def test_a_reader_sees_what_the_writer_commits_and_holds_up_none_of_it(journal: Journal, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    tail = JournalTail(path)
    tail.advance()
    with open_journal(path) as db:
        db.execute("BEGIN")
        assert db.execute("SELECT count(*) FROM changeovers").fetchone()[0] == 0
        started = time.perf_counter()
        for number in range(20):
            write_changeover(journal, f"a{number}")
        assert time.perf_counter() - started < limit_s(2.0)
        assert db.execute("SELECT count(*) FROM changeovers").fetchone()[0] == 0  # the reader's snapshot
        with pytest.raises(sqlite3.OperationalError):
            db.execute("DELETE FROM results")
    assert tail.advance()
    assert len(tail.finished_stages(changeovers=30)) == 20 and len(tail.finished_stages(changeovers=3)) == 3
    assert not tail.advance()
    assert tail.last_seconds() == {"LOAD_WEIGHTS": 0.25}


def test_a_journal_that_is_absent_damaged_or_strange_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    tail = JournalTail(path)
    assert not tail.advance() and not tail.problem
    path.write_bytes((RECORDED / "journal.sqlite").read_bytes()[:30_000])
    tail.advance()
    assert "cannot be read" in tail.problem
    with pytest.raises(InvalidArgument, match="cannot be read"):
        page(path)
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE results (id TEXT)")
    tail.advance()
    assert "no such table" in tail.problem
    shutil.copyfile(RECORDED / "journal.sqlite", tmp_path / "new")
    (tmp_path / "new").replace(path)
    assert tail.advance() and not tail.problem
    assert len(tail.finished_stages(changeovers=1000)) > 100


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


def test_a_query_without_end_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    shutil.copyfile(RECORDED / "journal.sqlite", path)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"), open_journal(path, within_s=0.1) as db:
        db.execute(f"{ENDLESS} SELECT count(*) FROM n").fetchone()


def test_changeovers_are_also_counted_since_the_nodes_last_start(journal: Journal, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for request_id in ("a", "b"):
        write_changeover(journal, request_id)
    assert page(path, restarts_now=0)["counts_now"] is None
    journal.begin_epoch("boot-2")  # the node's second start
    assert page(path, restarts_now=0)["counts_now"] == {"DONE": 0}
    write_changeover(journal, "c")
    journal.begin_epoch("boot-3")  # a restart of its coordinator
    write_changeover(journal, "d")
    last = page(path, restarts_now=1)
    assert (last["counts"], last["counts_now"]) == ({"DONE": 4}, {"DONE": 2})
    assert page(path)["counts_now"] is None, "without the supervisor's log a start and a restart look alike"
    assert 0 < last["since"] <= last["changeovers"][-1]["start_time"]
