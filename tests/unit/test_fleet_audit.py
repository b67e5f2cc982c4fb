"""Audit of a fleet's journal: clean as written, and every broken promise found after a change."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.cli.audit import BROKEN, CLEAN
from tasuki.fleet.audit import FleetInvariant, audit_fleet_journal
from tasuki.fleet.rules import Decision, Step, agreed, next_step
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.errors import FleetEnded, WeightsDiffer
from tasuki.wire.stages import Phase, Stage
from tests.unit.simulated_fleet import SimulatedFleet
from tests.unit.virtual_time import VirtualTimeLoop


async def two_rounds(folder: Path) -> None:
    fleet = SimulatedFleet(folder, num_nodes=2)
    for step in range(2):
        await fleet.learn(f"sample {step}")
        assert await fleet.acquire(Phase.ROLLOUT, f"r{step}") is None
        assert await fleet.acquire(Phase.TRAIN, f"t{step}") is None
    await fleet.close()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(two_rounds(folder))
    return folder / "fleet.sqlite"


CHANGES = {
    FleetInvariant.COMPARED: "UPDATE step_outcomes SET weights_digest = x'00' WHERE id = (SELECT max(id) FROM steps WHERE step = 'SYNC')",
    # Node 1's answer to LOAD_WEIGHTS says that it has not moved.
    FleetInvariant.BARRIER: (
        "UPDATE step_outcomes SET place = 'LOAD_TRAINER' WHERE id ="
        " (SELECT min(id) FROM steps WHERE step = 'LOAD_WEIGHTS' AND node_rank = 1)"
    ),
    FleetInvariant.DECIDED: "DELETE FROM decisions WHERE number = 1",
    FleetInvariant.RING: "UPDATE steps SET step = 'RESUME_WEIGHTS' WHERE id = (SELECT min(id) FROM steps WHERE step = 'LOAD_WEIGHTS')",
    FleetInvariant.LOOKED: "DELETE FROM step_outcomes WHERE id = (SELECT min(id) FROM steps WHERE step = 'RESUME_WEIGHTS')",
    FleetInvariant.FORWARD: "UPDATE outcomes SET status = 'FAILED' WHERE number = 1",
    FleetInvariant.VERSIONS_GROW: "UPDATE decisions SET policy_version = 0 WHERE number = 3",
    FleetInvariant.ONE_VERSION: (
        "UPDATE step_outcomes SET weights_digest = x'00' WHERE id = (SELECT min(id) FROM steps WHERE step = 'RESUME_KV')"
    ),
}


@pytest.mark.parametrize("invariant", FleetInvariant)
def test_a_broken_promise_is_named(invariant: FleetInvariant, journal: Path, tmp_path: Path) -> None:
    assert audit_fleet_journal(journal).violation is None
    changed = Path(shutil.copy(journal, tmp_path / "changed.sqlite"))
    with closing(sqlite3.connect(changed)) as db:
        assert db.execute(CHANGES[invariant]).rowcount > 0
        db.commit()
    violation = audit_fleet_journal(changed).violation
    assert violation is not None
    assert violation.invariant is invariant


def test_the_command_audits_the_fleets_journal_beside_the_nodes(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(journal.parent / "0" / "journal.sqlite", tmp_path)
    fleets = Path(shutil.copy(journal, tmp_path))
    assert main(["audit", str(tmp_path)]) == CLEAN
    assert "fleet_decisions=2" in capsys.readouterr().out
    with closing(sqlite3.connect(fleets)) as db:
        db.execute(CHANGES[FleetInvariant.DECIDED])
        db.commit()
    assert main(["audit", str(tmp_path)]) == BROKEN
    told = capsys.readouterr().out
    assert "broken: decided" in told
    assert "on node 0 a decision first, according to the fleet" in told


def test_a_node_that_cannot_follow_the_decision_ends_the_fleet(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = SimulatedFleet(tmp_path, num_nodes=2, patience_s=5.0)
        assert await fleet.acquire(Phase.TRAIN, "first") is None
        fleet.deaf_once_decided = 1
        error = await fleet.acquire(Phase.ROLLOUT, "r")
        assert isinstance(error, FleetEnded)
        assert fleet.ended is error
        assert error.metadata["node_rank"] == "1"
        assert fleet.serving() == set()  # the other node waits for it at OFFLOAD
        await fleet.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work())


DECISION = Decision(1, 4, b"digest")


@pytest.mark.parametrize(
    ("at", "digest", "until", "expected"),
    [
        (Stage.SYNC, b"digest", Stage.OFFLOAD, Stage.OFFLOAD),
        (Stage.OFFLOAD, b"digest", Stage.OFFLOAD, None),
        (Stage.OFFLOAD, b"digest", Stage.RESUME_KV, Stage.RESUME_KV),
        (Stage.RESUME_KV, b"digest", Stage.RESUME_KV, None),
        (Stage.RESUME_KV, b"digest", Stage.OFFLOAD, None),
        (Stage.LOAD_TRAINER, b"", Stage.OFFLOAD, Stage.LOAD_WEIGHTS),
        (Stage.RESUME_WEIGHTS, b"", Stage.OFFLOAD, Stage.SYNC),
        (Stage.SYNC, b"other", Stage.OFFLOAD, Step.ACQUIRE_TRAIN),
        (Stage.DRAIN, b"digest", Stage.RESUME_KV, Step.ACQUIRE_TRAIN),
        (None, b"", Stage.OFFLOAD, Step.ACQUIRE_TRAIN),
    ],
)
def test_forward_is_the_next_stage_or_the_weights_again(
    at: Stage | None, digest: bytes, until: Stage, expected: Stage | Step | None
) -> None:
    state = NodeState(stage=at.number if at else None, weights_digest=digest)
    assert next_step(state, until=until, decision=DECISION) is expected


def test_sums_agree_or_tell_what_differs() -> None:
    most = sums(3, b"l", 1, 2, 3)
    assert agreed([most, most]) == most
    for other, text in (
        (sums(2, b"l", 1, 2, 3), "version 2 in place of 3"),
        (sums(3, b"k", 1, 2, 3), "names, dtypes or shapes"),
        (sums(3, b"l", 1, 9, 9), "2 of 3 tensors differ.*1, 2"),
        (None, "do not know what they received"),
    ):
        with pytest.raises(WeightsDiffer, match=text) as caught:
            agreed([most, other, most])
        assert caught.value.metadata["nodes"] == "1"


def sums(version: int, layout: bytes, *checksums: int) -> WeightSums:
    return WeightSums(policy_version=version, layout_digest=layout, checksums=checksums)
