"""Acknowledged entries are on disk; unacknowledged ones show as unknown; and a coordinator on a full disk does nothing unrecorded."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.coordinator.journal import Intent, Journal, Outcome
from tasuki.coordinator.phases import path
from tasuki.node.__main__ import check_restart
from tasuki.rpc.failpoints import Action, Failpoints, plant
from tasuki.wire.errors import DiskFull, InvalidArgument
from tasuki.wire.stages import HOLDS, Phase, Stage, StageStatus
from tests.tiny_disk import TinyDisk, limited_files, tmpfs
from tests.unit.fake_node import acquire, make_node
from tests.unit.fake_services import FakeServices

TRAIN = HOLDS[Phase.TRAIN]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch("boot-1")
    return journal


def intend(journal: Journal, changeover_id: str, stage: Stage, *, is_undo: bool = False) -> Intent:
    return journal.intend(stage, changeover_id, is_undo=is_undo, trainer_boot_id="t1", rollout_boot_id="r1")


def test_a_journal_of_another_version_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE movements (id INTEGER); PRAGMA user_version = 1;")
    before = path.read_bytes()
    with pytest.raises(InvalidArgument) as refused:
        Journal(path)
    assert (refused.value.metadata["field"], refused.value.metadata["version"]) == ("state_dir", "1")
    assert path.read_bytes() == before


@pytest.mark.parametrize("header_bytes", [0, 100])
def test_a_damaged_journal_is_refused_by_name(tmp_path: Path, header_bytes: int) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    content = path.read_bytes()
    path.write_bytes(content[:header_bytes] + b"\xff" * (len(content) - header_bytes))
    with pytest.raises(InvalidArgument, match="state_dir: .*journal.sqlite is damaged: .*; move it elsewhere"):
        Journal(path)


def test_epoch_grows_with_every_start(tmp_path: Path) -> None:
    epochs = []
    for boot in range(3):
        journal = Journal(tmp_path / "journal.sqlite")
        epochs.append(journal.begin_epoch(f"boot-{boot}"))
        journal.close()
    assert epochs == [1, 2, 3]


def test_journal_commits_with_full_sync_in_wal_mode(journal: Journal) -> None:
    assert journal._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_sequence_grows_by_one_in_an_epoch_and_restarts_in_the_next(journal: Journal) -> None:
    changeover_id = journal.begin_changeover("r1", origin=TRAIN, target=Phase.ROLLOUT)
    first = [intend(journal, changeover_id, stage) for stage in (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS)]
    journal.begin_epoch("boot-2")
    second = intend(journal, changeover_id, Stage.SYNC)
    assert [(intent.epoch, intent.sequence) for intent in (*first, second)] == [(1, 1), (1, 2), (2, 1)]
    assert len({intent.request_id for intent in (*first, second)}) == 3


def test_publication_whose_answer_nobody_learned_hides_the_one_before(journal: Journal) -> None:
    changeover_id = journal.begin_changeover("r1", origin=TRAIN, target=Phase.ROLLOUT)
    assert journal.last(Stage.LOAD_WEIGHTS) is None
    known = intend(journal, changeover_id, Stage.LOAD_WEIGHTS)
    journal.done(known, Outcome(answer=b"handles", policy_version=3), seconds=0.5)
    lost = intend(journal, changeover_id, Stage.LOAD_WEIGHTS)
    assert journal.last(Stage.LOAD_WEIGHTS) is None
    journal.done(lost, Outcome(), seconds=0.0)
    assert journal.last(Stage.LOAD_WEIGHTS) is None


def test_served_version_counts_for_the_same_life_of_rollout_only(journal: Journal) -> None:
    changeover_id = journal.begin_changeover("r1", origin=TRAIN, target=Phase.ROLLOUT)
    journal.done(intend(journal, changeover_id, Stage.LOAD_WEIGHTS), Outcome(), seconds=0.1)
    journal.end_changeover(changeover_id, seconds=1.0, policy_version=7)
    assert journal.served_version("r1") == 7
    assert journal.served_version("another boot") is None


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
