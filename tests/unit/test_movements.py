"""Movements behind a stage are journalled with its result and at their end; an audit finds those that never ended."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tasuki.cli.__main__ import main
from tasuki.cli.node_view import draw, event_line
from tasuki.coordinator.encode import changeover_to_proto
from tasuki.coordinator.journal import Journal
from tasuki.memory.stages import Phase, Service, Stage
from tasuki.memory.tags import MemoryTag, Moved, Movement, MovementKind
from tasuki.rpc.movements import decode_movements, moved_by, pause_response
from tasuki.rpc.usage import TAG_VALUES
from tasuki.supervisor.node_snapshot import NodeSnapshot
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2, types_pb2
from tests.unit.fake_node import acquire, make_node
from tests.unit.fake_services import FakeServices

MIB = 2**20
LEAVES = Movement(MovementKind.LEAVE, MemoryTag.OPTIMIZER, 12 * MIB)
GROWS = Movement(MovementKind.GROW, MemoryTag.KV_CACHE, 40 * MIB)
LEFT = replace(LEAVES, seconds=0.25, end_time=1_700_000_000.0)
GREW = replace(GROWS, num_bytes=8 * MIB, seconds=0.5, end_time=1_700_000_000.5)


async def run(folder: Path, services: FakeServices, *phases: Phase) -> None:
    journal = Journal(folder / "journal.sqlite")
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    for number, phase in enumerate(phases):
        await acquire(node, phase, f"r{number}")
    journal.close()


def moving() -> FakeServices:
    return FakeServices(
        begun={Stage.OFFLOAD: (LEAVES,), Stage.RESUME_KV: (GROWS,)},
        ended={Stage.LOAD_TRAINER: (LEFT,), Stage.PAUSE_KV: (GREW,)},
    )


def audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    code = main(["audit", "--json", str(folder)])
    return code, json.loads(capsys.readouterr().out)


async def test_movements_are_journalled_with_the_stages_that_tell_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(tmp_path, moving(), Phase.ROLLOUT, Phase.TRAIN)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        rows = db.execute(
            "SELECT stage, kind, tag, movements.status, movements.bytes, movements.seconds, end_time"
            " FROM movements JOIN stages USING (id) ORDER BY id"
        ).fetchall()
    assert rows == [
        ("OFFLOAD", "LEAVE", "optimizer", "BEGUN", 12 * MIB, 0.0, None),
        ("RESUME_KV", "GROW", "kv_cache", "BEGUN", 40 * MIB, 0.0, None),
        ("PAUSE_KV", "GROW", "kv_cache", "ENDED", 8 * MIB, 0.5, 1_700_000_000.5),
        ("LOAD_TRAINER", "LEAVE", "optimizer", "ENDED", 12 * MIB, 0.25, 1_700_000_000.0),
    ]
    code, told = audit(tmp_path, capsys)
    assert (code, told["num_movements_ended"]) == (0, 2)


async def test_what_left_may_have_returned_before_load_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = moving()
    services.ended[Stage.LOAD_TRAINER] = (LEFT, replace(LEFT, kind=MovementKind.RETURN))
    await run(tmp_path, services, Phase.ROLLOUT, Phase.TRAIN)
    code, told = audit(tmp_path, capsys)
    assert (code, told["num_movements_ended"]) == (0, 3)


async def test_an_audit_names_a_movement_that_has_not_ended_when_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = moving()
    del services.ended[Stage.LOAD_TRAINER]
    await run(tmp_path, services, Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT)
    code, told = audit(tmp_path, capsys)
    violation = told["violation"]
    assert (code, violation["invariant"], violation["stage"]) == (1, "movements-end", "LOAD_TRAINER")
    assert violation["expected"] == f"the end of LEAVE of optimizer, {12 * MIB} bytes"


async def test_a_service_that_was_restarted_has_ended_what_went_on_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = moving()
    del services.ended[Stage.LOAD_TRAINER]

    async def lose_the_trainer(stage: Stage) -> None:
        if stage is Stage.PAUSE_KV:
            services.restart(Service.TRAINER, "killed")

    services.before_stage = lose_the_trainer
    await run(tmp_path, services, Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT)
    code, _ = audit(tmp_path, capsys)
    assert code == 0


@pytest.mark.parametrize(
    ("stage", "told", "expected"),
    [
        (
            Stage.LOAD_TRAINER,
            replace(LEFT, num_bytes=13 * MIB),
            f"at most {12 * MIB} bytes by LEAVE of optimizer, found {13 * MIB}",
        ),
        (Stage.LOAD_TRAINER, replace(LEFT, tag=MemoryTag.WEIGHTS), "the beginning of LEAVE of weights, which has ended"),
        (
            Stage.LOAD_TRAINER,
            replace(LEFT, kind=MovementKind.RETURN, tag=MemoryTag.WEIGHTS),
            "the beginning of RETURN of weights, which has ended",
        ),
        (Stage.PAUSE_KV, replace(GREW, kind=MovementKind.RETURN), "the beginning of RETURN of kv_cache, which has ended"),
    ],
)
async def test_an_audit_names_an_end_that_fits_no_beginning(
    stage: Stage, told: Movement, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = moving()
    services.ended[stage] = (told,)
    await run(tmp_path, services, Phase.ROLLOUT, Phase.TRAIN)
    code, report = audit(tmp_path, capsys)
    violation = report["violation"]
    assert (code, violation["invariant"], violation["stage"]) == (1, "movements-end", stage)
    assert violation["expected"] == expected


async def test_a_movement_behind_a_stage_that_has_none_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = moving()
    services.begun[Stage.PAUSE_WEIGHTS] = (GROWS,)
    await run(tmp_path, services, Phase.ROLLOUT, Phase.TRAIN)
    code, told = audit(tmp_path, capsys)
    assert (code, told["violation"]["stage"]) == (1, "PAUSE_WEIGHTS")


async def test_a_journal_without_the_table_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await run(tmp_path, FakeServices(), Phase.ROLLOUT)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("DROP TABLE movements")
    assert audit(tmp_path, capsys)[0] == 0


async def test_watch_tells_what_goes_on_and_what_has_ended(tmp_path: Path) -> None:
    await run(tmp_path, moving(), Phase.ROLLOUT, Phase.TRAIN)
    journal = Journal(tmp_path / "journal.sqlite")
    changeovers = [changeover_to_proto(one) for one in journal.changeovers(limit=2)]
    journal.close()
    lines = {event.stage: event_line(event) for one in changeovers for event in one.stages}
    assert lines[types_pb2.STAGE_OFFLOAD].endswith("optimizer may leave 12.0 MiB")
    assert lines[types_pb2.STAGE_RESUME_KV].endswith("kv_cache may grow 40.0 MiB")
    assert lines[types_pb2.STAGE_PAUSE_KV].endswith("kv_cache grew 8.0 MiB in 0.500 s")
    assert lines[types_pb2.STAGE_LOAD_TRAINER].endswith("optimizer left 12.0 MiB in 0.250 s")


def test_the_state_shows_pending_bytes_by_service_and_tag() -> None:
    def tag(which: MemoryTag, **figures: int) -> types_pb2.TagUsage:
        return types_pb2.TagUsage(tag=TAG_VALUES[which], device="cpu", **figures)

    snapshot = NodeSnapshot(
        node=coordinator_pb2.NodeState(),
        trainer=trainer_pb2.GetTrainerStateResponse(),
        rollout=rollout_pb2.GetRolloutStateResponse(),
        trainer_memory=memory_pb2.GetUsageResponse(
            tags=[
                *(tag(MemoryTag.OPTIMIZER, pending_bytes=3 * MIB, is_paused=True) for _ in range(2)),
                tag(MemoryTag.WEIGHTS, pending_bytes=MIB),
                tag(MemoryTag.GRADIENTS, is_paused=True),
            ]
        ),
        rollout_memory=memory_pb2.GetUsageResponse(tags=[tag(MemoryTag.KV_CACHE, pending_bytes=5 * MIB)]),
        changeovers=(),
        absent={},
    )
    shown = io.StringIO()
    Console(file=shown, width=200).print(draw(snapshot))
    expected = (
        "pending: trainer optimizer 6.0 MiB to leave, trainer weights 1.0 MiB to return, rollout kv_cache 5.0 MiB to grow"
    )
    assert expected in shown.getvalue()


def test_the_ranks_movements_are_added_and_end_with_the_slowest() -> None:
    ranks = [
        pause_response(Moved(5, begun=(GROWS,), ended=(LEFT,))),
        pause_response(Moved(7, begun=(GROWS,), ended=(replace(LEFT, seconds=0.75, end_time=1_700_000_001.0),))),
    ]
    total = replace(LEFT, num_bytes=24 * MIB, seconds=0.75, end_time=1_700_000_001.0)
    assert moved_by(ranks) == Moved(12, begun=(replace(GROWS, num_bytes=80 * MIB),), ended=(total,))


def test_a_kind_or_tag_of_a_later_build_is_left_out() -> None:
    known = types_pb2.Movement(kind=types_pb2.MOVEMENT_KIND_GROW, tag=types_pb2.MEMORY_TAG_KV_CACHE, bytes=1)
    later = types_pb2.Movement.FromString(b"\x08\x63\x10\x01"), types_pb2.Movement.FromString(b"\x08\x01\x10\x63")
    assert [one.num_bytes for one in decode_movements([known, *later, types_pb2.Movement()])] == [1]
