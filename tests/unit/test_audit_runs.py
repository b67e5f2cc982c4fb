"""Journals of coordinators under failing answers, services and disks: the audit finds every breach and reports no false one."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.coordinator.command_log import audit_commands
from tasuki.coordinator.history import Invariant, LoadRecord, read_history
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.replay import audit
from tasuki.v1 import memory_pb2, trainer_pb2, types_pb2
from tasuki.v1.weights_pb2 import LoadedCheckpoint
from tasuki.wire.errors import DiskFull, PeerUnavailable, StageOrder, StaleSequence, TasukiError
from tasuki.wire.stages import Phase, Service, Stage
from tests.unit.fake_node import acquire, events, make_node
from tests.unit.fake_services import FakeServices
from tests.unit.simulated_faults import Crash, CrashPoint, JournalFailpoints
from tests.unit.simulated_node import SimulatedNode
from tests.unit.virtual_time import VirtualTimeLoop


async def test_a_rollout_that_serves_an_older_version_than_before_is_found_out(tmp_path: Path) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices(version=3)
    for version, boot in ((3, "boot-1"), (2, "boot-2")):
        services.version = version
        journal.begin_epoch(boot)
        node = make_node(journal, services)
        await acquire(node, Phase.ROLLOUT, f"to {version}")
        await acquire(node, Phase.TRAIN, f"from {version}")
        services.restart(Service.TRAINER, "")
    violation = audit(read_history(tmp_path / "journal.sqlite")).violation
    assert violation is not None
    assert (violation.invariant, violation.changeover_id) == (Invariant.VERSIONS_GROW, "c000003")


async def test_training_that_begins_again_with_new_services_is_no_breach(tmp_path: Path) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices()
    for version, boot in ((3, "boot-1"), (0, "boot-2")):
        services.version = version
        journal.begin_epoch(boot)
        await acquire(make_node(journal, services), Phase.ROLLOUT, f"to {version}")
        for service in Service:
            services.restart(service, "")
    found = audit(read_history(tmp_path / "journal.sqlite"))
    assert (found.violation, found.num_rewinds, found.num_versions_served) == (None, 1, 2)


async def test_the_journal_says_from_which_checkpoint_a_version_was_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices(version=4)
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    for number, path in enumerate(("", "ck/version-1", "ck/version-1", "ck/version-2")):
        if path:
            services.loaded = LoadedCheckpoint(path=path, policy_version=5)
        await acquire(node, Phase.ROLLOUT, f"to {number}")
        await acquire(node, Phase.TRAIN, f"from {number}")
    loads = [LoadRecord("c000003", 5, "ck/version-1"), LoadRecord("c000007", 5, "ck/version-2")]
    assert list(read_history(tmp_path / "journal.sqlite").loads) == loads
    assert main(["audit", str(tmp_path)]) == 0
    assert "loaded: version 5 from ck/version-2, first published in c000007\n" in capsys.readouterr().out


async def test_a_run_under_way_is_clean_and_its_open_stage_is_counted(tmp_path: Path) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices()
    journal.begin_epoch("boot-1")
    changeover_id = journal.begin_changeover("mine", origin=Stage.LOAD_TRAINER, target=Phase.ROLLOUT)
    boots = {f"{service}_boot_id": boot for service, boot in services.boot_id.items()}
    journal.intend(Stage.LOAD_WEIGHTS, changeover_id, is_undo=False, **boots)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tmp_path.glob("journal.sqlite*"):
        shutil.copy(file, copy)
    for folder in (tmp_path, copy):
        found = audit(read_history(folder / "journal.sqlite"))
        assert (found.violation, found.num_unanswered, found.num_done, found.num_changeovers) == (None, 1, 0, 1)
    journal.close()


async def test_weights_that_were_not_taken_back_before_the_coordinator_died_are_served_without_another_sync(
    tmp_path: Path,
) -> None:
    failpoints, services = JournalFailpoints(on_crash=lambda: None), FakeServices(done_anyway={Stage.RESUME_KV})
    services.fail_once[Stage.RESUME_KV] = PeerUnavailable("socket closed")
    journal = Journal(tmp_path / "journal.sqlite", failpoints=failpoints)
    journal.begin_epoch("boot-1")
    failpoints.armed = (CrashPoint.INTENDED, 7)
    with pytest.raises(Crash):
        await acquire(make_node(journal, services), Phase.ROLLOUT, "cut off")
    assert services.asked[-1] == ("undo", Stage.SYNC)
    journal.begin_epoch("boot-2")
    await acquire(make_node(journal, services), Phase.ROLLOUT)
    assert (services.asked[-1], services.served) == (("undo", Stage.DRAIN), 0)
    assert audit(read_history(tmp_path / "journal.sqlite")).violation is None


async def test_rollout_that_was_silent_at_the_begin_of_an_empty_changeover_is_no_breach(tmp_path: Path) -> None:
    failpoints, services = JournalFailpoints(on_crash=lambda: None), FakeServices()
    journal = Journal(tmp_path / "journal.sqlite", failpoints=failpoints)
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    for stage in (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS):
        await events(node.run_stage(stage, f"hand {stage}"))
    journal.begin_epoch("boot-2")
    failpoints.armed, failpoints.is_full = (CrashPoint.INTEND, 0), True
    services.absent = {Service.ROLLOUT}
    with pytest.raises(DiskFull):
        await acquire(make_node(journal, services), Phase.TRAIN, "cut off")
    services.absent = set()
    journal.begin_epoch("boot-3")
    await make_node(journal, services).recover()
    history = read_history(tmp_path / "journal.sqlite")
    assert [one.origin for one in history.changeovers] == [Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS]
    assert audit(history).violation is None


def manual(epoch: int, sequence: int) -> types_pb2.CommandId:
    return types_pb2.CommandId(epoch=epoch, sequence=sequence, request_id="manual")


async def round_trip(node: SimulatedNode, name: str) -> list[TasukiError | None]:
    return [await node.acquire(phase, f"{phase} {name}") for phase in (Phase.ROLLOUT, Phase.TRAIN)]


def test_after_a_number_that_somebody_else_took_the_coordinator_goes_on_and_the_audit_names_it(tmp_path: Path) -> None:
    async def live() -> None:
        node = SimulatedNode(tmp_path, fault=lambda: None, waits_for_room=False)
        assert await round_trip(node, "first") == [None, None]
        assert node.trainer is not None
        await node.trainer.PublishWeights(trainer_pb2.PublishWeightsRequest(command=manual(1, 5000)))
        refused = await node.acquire(Phase.TRAIN, "back")
        assert isinstance(refused, StaleSequence)
        assert await node.acquire(Phase.TRAIN, "back again") is None
        assert await round_trip(node, "second") == [None, None]
        history, lives = read_history(tmp_path / "journal.sqlite"), node.logs.read(tmp_path)
        node.logs.close()
        assert max(intent.sequence for intent in history.stages) > 5000
        violation = audit(history).violation or audit_commands(history, lives)
        assert violation is not None
        assert violation.invariant in (Invariant.ORIGIN, Invariant.AS_ASKED)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live())


def test_a_number_that_was_taken_by_a_refused_stage_is_passed_over_and_the_audit_is_clean(tmp_path: Path) -> None:
    async def live() -> None:
        node = SimulatedNode(tmp_path, fault=lambda: None, waits_for_room=False)
        assert node.trainer is not None
        assert await round_trip(node, "first") == [None, None]
        wrong = memory_pb2.ResumeRequest(command=manual(1, 5000), stage=types_pb2.STAGE_LOAD_TRAINER)
        with pytest.raises(StageOrder):
            await node.trainer.Resume(wrong)
        assert isinstance((await round_trip(node, "refused"))[0], StaleSequence)
        assert await round_trip(node, "second") == [None, None]
        await node.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live())
