"""A fleet under faults: every message lost, every process killed, every journal write interrupted; never are two versions served.

Its journal's audit is clean as written, and finds every broken promise after a change. `make test` runs a sample of the fault points and
seeds, `make chaos` all of them.
"""

import asyncio
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.cli.audit import BROKEN, CLEAN
from tasuki.fleet.journal import FleetAudit, FleetInvariant, audit_fleet_journal
from tasuki.fleet.rules import Decision, Step, agreed, next_step
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.errors import FleetEnded, WeightsDiffer
from tasuki.wire.stages import Phase, Service, Stage
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder
from tests.unit.simulated_fleet import FleetFault, SimulatedFleet
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


NUM_SEEDS, NUM_CHUNKS, NUM_STEPS = (150, 15, 3) if IS_WHOLE else (3, 3, 2)
STRIDE = 1 if IS_WHOLE else 11
"""Runs one in STRIDE of the fault points."""
POINTS = ("intend", "intended", "begin", "begun", "end", "ended", "note", "noted", "decide", "decided")


def in_virtual_time(work: Callable[[], Awaitable[FleetAudit]]) -> FleetAudit:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work())


async def reach(fleet: SimulatedFleet, phase: Phase, request_id: str) -> None:
    """Repeats the request after an error, as a user does."""
    for attempt in range(50):
        error = await fleet.acquire(phase, f"{request_id} {attempt}")
        if error is None:
            return
        assert fleet.ended is None, fleet.ended
    raise AssertionError(f"phase {phase} was not reached: {error}")


async def round_trip(fleet: SimulatedFleet, step: int) -> None:
    await fleet.learn(f"sample {step}")
    await reach(fleet, Phase.ROLLOUT, f"serve {step}")
    assert [node.serves for node in fleet.nodes] == [(step + 1, 0)] * len(fleet.nodes)
    await reach(fleet, Phase.TRAIN, f"train {step}")
    assert fleet.serving() == set()


class At:
    """Injects one fault, at the message with this number."""

    def __init__(self, place: int, fault: FleetFault) -> None:
        self._place, self._fault, self._number = place, fault, 0
        self.is_on = False

    def __call__(self) -> FleetFault | None:
        self._number += self.is_on
        return self._fault if self.is_on and self._number == self._place else None


async def once(place: int, fault: FleetFault) -> tuple[FleetAudit, int]:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        at = At(place, fault)
        fleet = SimulatedFleet(Path(folder), num_nodes=2, fault=at)
        await reach(fleet, Phase.TRAIN, "first")
        at.is_on, before = True, fleet.num_calls
        await round_trip(fleet, 0)
        num_calls, at.is_on = fleet.num_calls - before, False
        await round_trip(fleet, 1)
        return await fleet.close(), num_calls


NUM_MESSAGES = 22
"""Messages of a fault-free round trip of two nodes: per node, one look in each direction and nine stages."""


def test_a_round_trip_takes_so_many_messages() -> None:
    found, num_calls = asyncio.Runner(loop_factory=VirtualTimeLoop).run(once(0, FleetFault.DROP))
    assert (num_calls, found.num_unanswered, found.num_decisions) == (NUM_MESSAGES, 0, 2)


@pytest.mark.parametrize("fault", list(FleetFault), ids=lambda fault: fault.name)
def test_one_fault_at_any_message_leaves_one_version_and_the_way_on(fault: FleetFault) -> None:
    for place in range(1, NUM_MESSAGES + 1, STRIDE):
        found, _ = asyncio.Runner(loop_factory=VirtualTimeLoop).run(once(place, fault))
        assert found.num_decisions >= 2, place


async def interrupted(point: str, number: int, *, is_full: bool) -> FleetAudit:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        fleet = SimulatedFleet(Path(folder), num_nodes=2)
        await reach(fleet, Phase.TRAIN, "first")
        fleet.failpoints.is_full, fleet.failpoints.armed = is_full, (point, number)
        await round_trip(fleet, 0)
        fleet.failpoints.armed = None
        await round_trip(fleet, 1)
        return await fleet.close()


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("point", POINTS)
def test_a_write_that_is_cut_off_leaves_one_version_and_the_way_on(point: str, is_full: bool) -> None:
    for number in range(12) if IS_WHOLE else [POINTS.index(point)]:
        found = in_virtual_time(lambda number=number: interrupted(point, number, is_full=is_full))
        assert found.num_decisions >= 2


async def simulate(seed: int) -> FleetAudit:
    """Runs a few rounds in which about one message in ten fails, and the fleet sometimes dies at a write."""
    draw = random.Random(seed)
    share, is_calm = draw.choice((0.03, 0.1, 0.2)), False

    def fault() -> FleetFault | None:
        return None if is_calm or draw.random() > share else draw.choice(list(FleetFault))

    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        fleet = SimulatedFleet(Path(folder), num_nodes=3, fault=fault)
        for step in range(NUM_STEPS):
            if draw.random() < share:
                fleet.failpoints.armed = draw.choice(POINTS), draw.randrange(12)
            await fleet.learn(f"sample {step}")
            await reach(fleet, Phase.ROLLOUT, f"serve {step}")
            await reach(fleet, Phase.TRAIN, f"train {step}")
        is_calm, fleet.failpoints.armed = True, None
        await round_trip(fleet, NUM_STEPS)
        return await fleet.close()


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_seed_ends_with_one_version_and_clean_journals(chunk: int) -> None:
    for seed in range(chunk, NUM_SEEDS, NUM_CHUNKS):
        assert in_virtual_time(lambda seed=seed: simulate(seed)).num_decisions > NUM_STEPS, seed


def test_a_node_that_was_away_when_the_fleet_started_is_told_until_it_answers(tmp_path: Path) -> None:
    faults = [FleetFault.DROP] * 4

    async def work() -> FleetAudit:
        fleet = SimulatedFleet(tmp_path, num_nodes=2, fault=lambda: faults.pop() if faults else None)
        await asyncio.sleep(0.2)
        assert fleet.fleet.state().last_error == "PEER_UNAVAILABLE: node 0: connection reset"
        await asyncio.sleep(5.0)
        assert (Stage.of(fleet.fleet.state().stage), fleet.fleet.state().last_error) == (Stage.LOAD_TRAINER, "")
        fleet.nodes[0].kill(Service.TRAINER)
        assert Stage.of((await fleet.fleet.look()).stage) is None
        assert fleet.nodes[0].node.state().last_error.startswith("PEER_UNAVAILABLE: ")
        await asyncio.sleep(60.0)
        assert Stage.of((await fleet.fleet.look()).stage) is Stage.LOAD_TRAINER
        assert fleet.nodes[0].node.state().last_error == ""
        return await fleet.close()

    in_virtual_time(work)
