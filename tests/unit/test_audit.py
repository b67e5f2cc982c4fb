"""A journal of a real run is clean; one that was edited is not, and the audit names the broken invariant."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.coordinator.history import read_history
from tasuki.coordinator.journal import Journal
from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.v1 import trainer_pb2
from tasuki.v1.ranks_pb2 import LoggedForwardBackward, TrainingRecord
from tasuki.v1.types_pb2 import ROLE_CRITIC
from tasuki.wire.errors import InvalidArgument, OutOfGpuMemory, PathNotFound
from tasuki.wire.stages import Phase, Stage
from tests.unit.fake_node import acquire, make_node
from tests.unit.fake_services import FakeServices

# Intents of the run below. c000001: 1 to 5; c000002: 6 to 9; c000003 fails at RESUME_KV: 10 to 14, undone by 15 to 18; c000004: 19 to
# 23 with version 1; epoch 2 finds it in ROLLOUT; c000005: 24 to 27.


@pytest.fixture(scope="module")
def journal_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the journal of two epochs, with an undone changeover."""
    path = tmp_path_factory.mktemp("run") / "journal.sqlite"
    asyncio.run(_write(path))
    return path


async def _write(path: Path) -> None:
    journal, services = Journal(path), FakeServices()
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    services.version = 1
    services.fail_once[Stage.RESUME_KV] = OutOfGpuMemory("no room")
    with pytest.raises(OutOfGpuMemory):
        await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.ROLLOUT, "again")
    journal.begin_epoch("boot-2")
    await acquire(make_node(journal, services), Phase.TRAIN)
    journal.close()


@pytest.fixture
def run(journal_of_a_run: Path, tmp_path: Path) -> Path:
    """Returns a state folder with a journal that a test may damage."""
    shutil.copy(journal_of_a_run, tmp_path)
    return tmp_path


def change(run: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        for statement in statements:
            assert db.execute(statement).rowcount != 0, statement
        db.commit()


def test_a_real_run_is_clean_and_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "clean\nepochs=2 changeovers=5 done=4 failed=1 undone=0 interrupted=0 stages=27 stages_done=22 stages_failed=1 "
    )
    assert "stages_undone=4 unanswered=0 versions_served=2 rewinds=0 " in told


@pytest.mark.parametrize(
    ("invariant", "where", "statements"),
    [
        ("numbers-grow", "c000002 PAUSE_KV 9 7", ["UPDATE stages SET epoch = 9 WHERE id = 7"]),
        ("numbers-grow", "c000002 PAUSE_WEIGHTS 1 8", ["UPDATE stages SET sequence = 100 WHERE id = 7"]),
        ("numbers-grow", "c000003 None 3 None", ["UPDATE changeovers SET epoch = 3 WHERE number = 3"]),
        ("one-open-changeover", "c000002 None 1 None", ["DELETE FROM outcomes WHERE number = 2"]),
        ("one-open-changeover", "c000001 LOAD_WEIGHTS 1 10", ["UPDATE stages SET number = 1 WHERE id = 10"]),
        ("one-open-changeover", "c000005 DRAIN 1 30", ["UPDATE stages SET epoch = 1, sequence = 30 WHERE id = 24"]),
        ("one-result", " None None None", ["DELETE FROM stages WHERE id = 8"]),
        ("one-result", "c000001 SYNC 1 3", ["UPDATE results SET status = 'UNDONE' WHERE id = 3"]),
        ("one-result", "c000001 SYNC 1 3", ["UPDATE results SET status = 'FAILED' WHERE id = 3"]),
        ("one-result", "c000001 SYNC 1 3", ["UPDATE results SET error_reason = 'INTERNAL' WHERE id = 3"]),
        (
            "one-result",
            "c000001 SYNC 1 3",
            [
                "CREATE TABLE twice AS SELECT * FROM results",
                "INSERT INTO twice SELECT * FROM results WHERE id = 3",
                "DROP TABLE results",
                "ALTER TABLE twice RENAME TO results",
            ],
        ),
        ("one-result", "c000009 None None None", ["UPDATE outcomes SET number = 9 WHERE number = 5"]),
        ("one-result", "c000002 None None None", ["UPDATE outcomes SET status = 'FAILED' WHERE number = 2"]),
        ("intents-settled", "c000002 PAUSE_KV 1 7", ["DELETE FROM results WHERE id = 7"]),
        ("origin", "c000002 None 1 None", ["UPDATE changeovers SET origin = 'SYNC' WHERE number = 2"]),
        ("ring", "c000001 SYNC 1 2", ["UPDATE stages SET stage = 'SYNC' WHERE id = 2"]),
        ("ring", "c000001 RESUME_WEIGHTS 1 2", ["DELETE FROM results WHERE id = 1", "DELETE FROM stages WHERE id = 1"]),
        ("undo", "c000003 RESUME_WEIGHTS 1 15", ["UPDATE stages SET stage = 'RESUME_WEIGHTS' WHERE id = 15"]),
        ("undo", "c000003 RESUME_WEIGHTS 1 16", ["DELETE FROM results WHERE id = 15", "DELETE FROM stages WHERE id = 15"]),
        ("one-holder", "c000001 RESUME_KV 1 5", ["DELETE FROM results WHERE id = 4", "DELETE FROM stages WHERE id = 4"]),
        ("one-holder", "c000002 LOAD_TRAINER 1 9", ["DELETE FROM results WHERE id = 8", "DELETE FROM stages WHERE id = 8"]),
        ("sync-of-published", "c000001 SYNC 1 3", ["UPDATE stages SET trainer_boot_id = 'other' WHERE id >= 3"]),
        ("sync-of-published", "c000001 SYNC 1 3", ["UPDATE results SET policy_version = 5 WHERE id = 3"]),
        ("served-after-sync", "c000001 RESUME_KV 1 5", ["UPDATE stages SET rollout_boot_id = 'other' WHERE id >= 5"]),
        (
            "versions-grow",
            "c000003 LOAD_WEIGHTS 1 10",
            ["UPDATE results SET policy_version = 5 WHERE id = 1", "UPDATE outcomes SET policy_version = 5 WHERE number = 1"],
        ),
        ("target", "c000001 None 1 None", ["UPDATE outcomes SET policy_version = 5 WHERE number = 1"]),
        ("target", "c000002 None 1 None", ["UPDATE changeovers SET target = 'ROLLOUT' WHERE number = 2"]),
    ],
)
def test_a_broken_journal_is_found_out(
    invariant: str, where: str, statements: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, *statements)
    assert main(["audit", "--json", str(run)]) == 1
    told = json.loads(capsys.readouterr().out)
    violation = told["violation"]
    assert (told["is_clean"], violation["invariant"]) == (False, invariant)
    assert f"{violation['changeover_id']} {violation['stage']} {violation['epoch']} {violation['sequence']}" == where
    assert violation["expected"]
    main(["audit", str(run)])
    assert "counted before the violation: epochs=2" in (text := capsys.readouterr().out) and "=0" not in text


def test_reading_leaves_nothing_beside_a_journal_that_nobody_writes(run: Path) -> None:
    before = sorted(run.iterdir())
    read_history(run / "journal.sqlite")
    assert sorted(run.iterdir()) == before


def log_line(name: str, sequence: int, outcome: str = "OK", *, epoch: int = 1, changeover: str = "c000001") -> str:
    request_id = f"{changeover}-{epoch}-{sequence}"
    return (
        f"2026-01-01 00:00:00,000 INFO service=rollout logger=tasuki.rpc event=command name={name} epoch={epoch}"
        f" sequence={sequence} outcome={outcome} seconds=0.1 request_id={request_id!a}\n"
    )


SERVING = "2026-01-01 00:00:00,000 INFO service=rollout logger=tasuki.rpc event=serving service=rollout target=unix:r pid=1\n"


@pytest.mark.parametrize(
    ("invariant", "lines"),
    [
        ("executed-once", [SERVING, log_line("RESUME_WEIGHTS", 2), log_line("RESUME_WEIGHTS", 2)]),
        ("executed-once", [SERVING, log_line("RESUME_WEIGHTS", 2, "STAGE_ORDER")]),
        ("executed-in-order", [SERVING, log_line("SYNC", 3), log_line("RESUME_WEIGHTS", 2)]),
        (None, [SERVING, log_line("RESUME_WEIGHTS", 2), log_line("SYNC", 3), SERVING, log_line("RESUME_WEIGHTS", 2)]),
        (None, ["cut off", SERVING, "noise\n", log_line("OptimStep", 0, epoch=0), log_line("SYNC", 3)]),
    ],
)
def test_what_a_service_logged_is_compared_with_the_journal(
    invariant: str | None, lines: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "rollout.log").write_text("".join(lines))
    assert main(["audit", "--json", str(run)]) == (invariant is not None)
    told = json.loads(capsys.readouterr().out)
    assert told["num_logged_commands"] == sum("event=command" in line for line in lines)
    assert (told["violation"] or {}).get("invariant") == invariant


def record(request_id: str, command: str) -> TrainingRecord:
    content = {
        "checkpoint": trainer_pb2.LoadCheckpointRequest(path="/c"),
        "forward_backward": LoggedForwardBackward(),
        "optim_step": trainer_pb2.OptimStepRequest(),
    }
    return TrainingRecord(request_id=request_id, **{command: content[command]})


@pytest.mark.parametrize(
    ("expected", "commands"),
    [
        ("", ["checkpoint a", "forward_backward b", "forward_backward c", "optim_step d", "forward_backward e"]),
        (
            "found record 2 (forward_backward, request id 'b') again",
            ["forward_backward b", "optim_step c", "forward_backward b"],
        ),
        ("gradients before record 2 (optim_step", ["forward_backward b", "optim_step c", "optim_step d"]),
        ("", ["forward_backward b", "forward_backward c critic", "optim_step d critic", "optim_step e"]),
        ("gradients before record 1 (optim_step", ["forward_backward b", "optim_step c critic"]),
        ("a checkpoint as the first record only", ["forward_backward b", "checkpoint c"]),
    ],
)
async def test_the_trainers_log_is_looked_through_for_repetitions(
    expected: str, commands: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TrainingLog(run / "training.log", failpoints=NO_FAILPOINTS)
    for command in commands:
        name, request_id, *role = command.split()
        made = record(request_id, name)
        if role:
            getattr(made, name).role = ROLE_CRITIC
        async with log.command(made):
            pass
    log.close()
    assert main(["audit", str(run)]) == bool(expected)
    told = capsys.readouterr().out
    assert f"training_records={len(commands)}" in told
    assert not expected or ("broken: trained-once" in told and expected in told)


def test_what_is_no_journal_is_refused_with_a_cause(tmp_path: Path, run: Path) -> None:
    def refused(path: Path, error: type[Exception], cause: str) -> None:
        with pytest.raises(error, match=cause):
            read_history(path)
        assert main(["audit", str(path)]) == 2

    refused(tmp_path / "missing", PathNotFound, "no journal at")
    (tmp_path / "text").write_text("hello " * 1000)
    refused(tmp_path / "text", InvalidArgument, "not a database")
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", InvalidArgument, "schema version 0, this build reads 2")
    journal = run / "journal.sqlite"
    change(run, "UPDATE stages SET stage = 'JUGGLE' WHERE id = 3")
    refused(journal, InvalidArgument, "does not know: 'JUGGLE'")
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) // 2])
    refused(journal, InvalidArgument, "cannot be read|damaged")
    journal.write_bytes(whole)
    with closing(sqlite3.connect(journal)) as db:
        db.execute("PRAGMA user_version = 7")
    refused(journal, InvalidArgument, "schema version 7")
    (tmp_path / "folder").mkdir()
    assert main(["audit", str(tmp_path / "folder")]) == 2
