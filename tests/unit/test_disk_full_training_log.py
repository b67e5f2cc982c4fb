"""A training log on a disk without room."""

from pathlib import Path

import pytest

from tasuki.rpc.failpoints import Action, Failpoints, plant
from tasuki.trainer.durable.training_log import TrainingLog, read_training_log
from tasuki.v1 import trainer_pb2
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.wire.errors import DiskFull
from tests.unit.test_training_log import ids, learn, step, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "training.log"


async def test_full_disk_refuses_a_command_before_it_is_carried_out(path: Path, tmp_path: Path) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"))
    plant(tmp_path, "trainer", "log.begin", Action.FULL)
    with pytest.raises(DiskFull, match="No space left on device; nothing was trained"):
        async with log.command(learn("b")):
            pytest.fail("the block is entered")
    await write(log, learn("c"))
    log.close()
    assert ids(path) == ["a", "c"]


async def test_a_mark_that_cannot_be_written_stops_training_until_the_trainer_is_restarted(path: Path, tmp_path: Path) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"))
    plant(tmp_path, "trainer", "log.commit", Action.FULL)
    with pytest.raises(DiskFull, match="the trainer is ahead of it"):
        await write(log, step("b"))
    with pytest.raises(DiskFull, match="lacks a completed command"):
        await write(log, learn("c"))
    with pytest.raises(DiskFull, match="lacks a completed command"):
        log.check_not_behind()  # as before saving a checkpoint
    log.close()
    assert ids(path) == ["a"]


async def test_full_disk_at_a_saved_checkpoint_leaves_the_log_as_it_was_and_warns(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"), step("b"))
    plant(tmp_path, "trainer", "log.replace", Action.FULL)
    checkpoint = TrainingRecord(checkpoint=trainer_pb2.LoadCheckpointRequest(path="/c"))
    await log.saved(checkpoint)
    aside = path.with_suffix(".part")
    assert not aside.exists()
    assert [record.request_id for record in read_training_log(path)] == ["a", "b"]
    aside.mkdir()  # no file can be opened there, as on a read-only disk
    await log.saved(checkpoint)
    aside.rmdir()
    assert caplog.text.count("event=log_not_shortened checkpoint='/c'") == 2
    assert [record.request_id for record in read_training_log(path)] == ["a", "b"]
    await write(log, learn("c"))
    await log.saved(checkpoint)
    log.close()
    assert ids(path) == ["", "c"]
