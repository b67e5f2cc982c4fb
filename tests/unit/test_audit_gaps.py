"""Audits detect when acknowledged entries are removed from journal or logs, and report files that are missing entirely."""

import asyncio
import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.v1.ranks_pb2 import LoggedForwardBackward, TrainingRecord
from tasuki.wire.stages import Phase, Service
from tests.unit.simulated_node import SimulatedNode
from tests.unit.test_audit import change
from tests.unit.virtual_time import VirtualTimeLoop

# Intents of the run below: stages 1 to 5, 6 to 9, 10 to 14 and 15 to 18 in epoch 1, and likewise in epoch 2 after a new trainer.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the state folder of two epochs with two round trips each."""
    folder = tmp_path_factory.mktemp("whole")
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_live(folder))
    return folder


async def _live(folder: Path) -> None:
    node = SimulatedNode(folder, fault=lambda: None, waits_for_room=False)
    for trip in range(4):
        assert await node.learn(f"sample {trip}") is None
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            assert await node.acquire(phase, f"{phase} {trip}") is None
        if trip == 1:
            node.kill(Service.TRAINER)
            await asyncio.sleep(5.0)
            await node.restart_coordinator()
            await node.node.recover()
    (folder / "logs").mkdir()
    node.logs.read(folder / "logs")
    await node.close()


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """Copies the state folder for a test to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def edit(run: Path, service: str, pattern: str, text: str) -> None:
    log = run / "logs" / f"{service}.log"
    edited, count = re.subn(pattern, text, log.read_text(), flags=re.MULTILINE)
    assert count
    log.write_text(edited)


def audited(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns the exit code, the violated invariant and the value that it expects."""
    code = main(["audit", "--json", str(run)])
    violation = json.loads(capsys.readouterr().out)["violation"] or {"invariant": "", "expected": ""}
    return code, violation["invariant"], violation["expected"]


TRIP = "IN (SELECT id FROM stages WHERE number IN (3, 4))"


@pytest.mark.parametrize("has_logs", [True, False])
@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (
            [
                f"DELETE FROM results WHERE id {TRIP}",
                "DELETE FROM stages WHERE number IN (3, 4)",
                "DELETE FROM outcomes WHERE number IN (3, 4)",
                "DELETE FROM changeovers WHERE number IN (3, 4)",
            ],
            "c000003, found c000005 in its place",
        ),
        (
            [
                "DELETE FROM results WHERE id > 18",
                "DELETE FROM stages WHERE id > 18",
                "DELETE FROM outcomes WHERE number > 4",
                "DELETE FROM changeovers WHERE number > 4",
            ],
            "c000005, since the journal has numbered changeovers up to 8",
        ),
        (
            [f"DELETE FROM {table}" for table in ("results", "stages", "outcomes", "changeovers", "epochs")],
            "epoch 1, since the journal has numbered epochs up to 2",
        ),
        (["UPDATE stages SET sequence = 2 * sequence WHERE epoch = 2 AND sequence > 9"], "sequence 10, found 20"),
    ],
)
def test_what_is_missing_in_the_journal_is_found_out(
    statements: list[str], expected: str, has_logs: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_logs:
        shutil.rmtree(run / "logs")
    change(run, *statements)
    assert audited(run, capsys) == (1, "none-missing", expected)


def test_commands_of_which_a_journal_that_was_recreated_knows_nothing_are_found_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, *(f"DELETE FROM {table}" for table in ("results", "stages", "outcomes", "changeovers")))
    change(run, "DELETE FROM sqlite_sequence WHERE name <> 'epochs'")
    code, invariant, expected = audited(run, capsys)
    assert (code, invariant) == (1, "executed-as-asked")
    assert expected == "an intent in the journal for 'c000001-1-1', which trainer carried out, at LOAD_WEIGHTS"


@pytest.mark.parametrize(
    ("statements", "invariant", "expected"),
    [
        (
            ["UPDATE stages SET trainer_boot_id = 'other' WHERE id = 7"],
            "lives-in-order",
            "trainer with boot id other, which came after trainer-1",
        ),
        (  # the last one in the journal
            ["UPDATE stages SET trainer_boot_id = 'other' WHERE id >= 35"],
            "executed-as-asked",
            "trainer with boot id trainer-2, which carried it out, found other",
        ),
        (
            [
                f"UPDATE {table} SET policy_version = policy_version + 1 WHERE policy_version > 0"
                for table in ("results", "outcomes")
            ],
            "executed-as-asked",
            "version 1, as trainer says, found 2",
        ),
    ],
)
def test_boot_ids_and_versions_that_no_service_had_are_found_out(
    statements: list[str], invariant: str, expected: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, *statements)
    assert audited(run, capsys) == (1, invariant, expected)


@pytest.mark.parametrize(
    ("service", "pattern", "text", "expected"),
    [
        ("rollout", "^.* name=SYNC .*\n", "", "a line for 'c000001-1-3' in the log of rollout"),
        ("rollout", "^.* name=SYNC .* sequence=12 .*\n", "", "a line for 'c000003-1-12' in the log of rollout"),
        ("trainer", "^.* sequence=1 .*\n", "", "a line for 'c000001-1-1' in the log of trainer"),
        (
            "rollout",
            r"\Z",
            "\nevent=command name=SYNC epoch=2 sequence=99 outcome=OK seconds=0.1 boot_id=rollout-1 version=4 request_id='manual'",
            "an intent in the journal for 'manual', which rollout carried out",
        ),
        ("rollout", " name=SYNC epoch=1 sequence=12 ", " name=SYNC epoch=1 sequence=13 ", "SYNC at epoch 1 and sequence 12"),
        ("rollout", " name=DRAIN epoch=1 ", " name=PAUSE_KV epoch=1 ", "DRAIN at epoch 1 and sequence 6"),
        ("trainer", r"(sequence=10 .*) version=2 ", r"\1 version=5 ", "version 5, as trainer says, found 2"),
        ("trainer", r"(epoch=1 sequence=13 .*) boot_id=\S+ ", r"\1 boot_id=trainer-1 ", ""),
    ],
)
def test_logs_that_tell_something_else_are_found_out(
    service: str, pattern: str, text: str, expected: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, service, pattern, text)
    code, invariant, found = audited(run, capsys)
    assert (code, invariant) == ((1, "executed-as-asked") if expected else (0, ""))
    assert expected in found


def test_what_is_not_there_is_told_and_is_no_breach(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "logs" / "rollout.log").unlink()
    edit(run, "trainer", r"\A(?:.*\n){4}", "")  # rotated
    assert main(["audit", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("clean\nepochs=2 ")
    assert f"not audited: commands of rollout: {run}/logs/rollout.log has none\n" in told
    assert "not audited: commands of trainer after a start: missing in" in told


def test_lines_that_a_full_disk_took_are_told_and_are_no_breach(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run, "rollout", "^.* name=SYNC .* sequence=12 .*\n", "event=log_lines_lost\n")
    assert main(["audit", str(run)]) == 0
    assert "not audited: whether rollout ran every command in the journal" in capsys.readouterr().out


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE stages SET sequence = 'abc' WHERE id = 3",
        "UPDATE stages SET request_id = x'00ff' WHERE id = 3",
        "UPDATE results SET policy_version = 'new' WHERE id = 1",
        "UPDATE changeovers SET epoch = 1.5 WHERE number = 2",
        "UPDATE sqlite_sequence SET seq = 'many'",
        "UPDATE results SET answer = 7 WHERE id = 1",
    ],
)
def test_a_value_of_another_kind_is_refused_with_a_cause(statement: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, statement)
    assert main(["audit", str(run)]) == 2
    assert re.search("error INVALID_ARGUMENT: journal: .* where .* belongs", capsys.readouterr().err)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["training.log", "logs/trainer.log", "journal.sqlite-wal", "fleet.sqlite-journal", "state_dir"]
)
def test_a_fifo_among_the_records_is_told_and_nobody_waits_for_it(run: Path, name: str, capsys: pytest.CaptureFixture[str]):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    if name.startswith("fleet"):
        (run / "fleet.sqlite").touch()
    assert main(["audit", str(run)]) == 2
    told = capsys.readouterr()
    assert re.search(rf"{name}.* is not a regular file|is not a regular file: .*{name}", told.out + told.err)
    if name.endswith(".log"):
        assert "apart from what cannot be read, clean" in told.out


def test_a_record_that_only_has_the_right_checksum_is_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "training.log").write_bytes(struct.pack("<IIB", 1, zlib.crc32(b"\xff"), 1) + b"\xff")
    assert main(["audit", str(run)]) == 2
    assert "training.log is damaged at byte 0" in capsys.readouterr().out


@pytest.mark.parametrize(("statement", "code"), [("", 2), ("UPDATE results SET policy_version = 9 WHERE id = 3", 1)])
async def test_a_damaged_training_log_is_told_together_with_the_journals_verdict(
    statement: str, code: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TrainingLog(run / "training.log", failpoints=NO_FAILPOINTS)
    for request_id in ("a", "b"):
        async with log.command(TrainingRecord(request_id=request_id, forward_backward=LoggedForwardBackward())):
            pass
    log.close()
    content = (run / "training.log").read_bytes()
    (run / "training.log").write_bytes(b"\xff" + content[1:])
    if statement:
        change(run, statement)
    assert main(["audit", str(run)]) == code
    told = capsys.readouterr().out
    assert "training.log is damaged at byte 0" in told
    assert "load a checkpoint" not in told
    assert ("broken: sync-of-published" if statement else "apart from what cannot be read, clean") in told
