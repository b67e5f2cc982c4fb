"""A coordinator whose journal cannot be written: it carries out nothing unrecorded, and continues once there is room."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.phases import path
from tasuki.node.__main__ import check_restart
from tasuki.rpc.failpoints import Action, Failpoints, plant
from tasuki.wire.errors import DiskFull
from tasuki.wire.stages import HOLDS, Phase, Stage, StageStatus
from tests.tiny_disk import TinyDisk, limited_files, tmpfs
from tests.unit.fake_node import acquire, make_node
from tests.unit.fake_services import FakeServices

TO_ROLLOUT = path(HOLDS[Phase.TRAIN], Phase.ROLLOUT)
TO_TRAIN = path(HOLDS[Phase.ROLLOUT], Phase.TRAIN)


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TinyDisk]:
    folder = tmp_path / "disk"
    with tmpfs(folder, num_kib=640) if request.param == "tmpfs" else limited_files(folder) as disk:
        yield disk


def written(journal: Journal) -> list[tuple[str, Stage]]:
    rows = journal._db.execute("SELECT stage, is_undo FROM stages ORDER BY id").fetchall()
    return [("undo" if row["is_undo"] else "run", Stage(row["stage"])) for row in rows]


@pytest.mark.parametrize("target", [Phase.ROLLOUT, Phase.TRAIN])
@pytest.mark.parametrize("point", ["intend", "intended", "note", "noted"])
async def test_one_failed_write_fails_the_changeover_and_the_next_one_succeeds(target: Phase, point: str, tmp_path: Path):
    for stage in TO_ROLLOUT if target is Phase.ROLLOUT else TO_TRAIN:
        folder = tmp_path / stage
        folder.mkdir()
        with closing(Journal(folder / "journal.sqlite", failpoints=Failpoints("coordinator", folder=folder))) as journal:
            journal.begin_epoch("boot-1")
            services = FakeServices()
            node = make_node(journal, services)
            if target is Phase.TRAIN:
                await acquire(node, Phase.ROLLOUT)
            plant(folder, "coordinator", f"{stage}.{point}", Action.FULL)
            with pytest.raises(DiskFull, match=r"journal .*journal.sqlite cannot be written .*make room") as full:
                await acquire(node, target)
            assert full.value.metadata["path"] == str(folder / "journal.sqlite")
            await acquire(node, target)
            assert Phase.of(node.state().phase) is target
            assert (await services.observe()).place() is HOLDS[target]
            # Not carried out: the intent whose write failed, and the next one, whose caller was told of a failure after the write.
            intents = written(journal)
            for asked in services.asked:
                assert asked in intents, f"{stage}.{point}: {asked} is not in the journal"
                intents.remove(asked)
            without_result = "SELECT count(*) FROM stages LEFT JOIN results USING (id) WHERE status IS NULL"
            assert journal._db.execute(without_result).fetchone()[0] == 0
            assert [one for one in journal.changeovers(limit=100) if one.status == StageStatus.STARTED.number] == []


def test_journal_on_a_read_only_disk_is_a_clear_error(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", num_kib=512) as disk:
        Journal(disk.folder / "journal.sqlite").close()
        disk.make_read_only()
        with (
            pytest.raises(DiskFull, match=r"journal.sqlite cannot be written \(.*\).*make it writable"),
            closing(Journal(disk.folder / "journal.sqlite")) as journal,
        ):
            journal.begin_epoch("boot-2")


def test_a_coordinator_waits_for_room_before_it_is_restarted(disk: TinyDisk) -> None:
    config = NodeConfig(state_dir=disk.folder, model={"path": disk.folder})
    disk.fill()
    with pytest.raises(DiskFull, match="cannot be written"):
        check_restart(config, "coordinator")
    check_restart(config, "rollout")
    disk.free()
    check_restart(config, "coordinator")
