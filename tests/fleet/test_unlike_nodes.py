"""Nodes that do not match their fleet, each started beside a real leader: refused by name, or reported by the doctor."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.node.services import EXIT_REFUSED
from tests.fleet.network import places_of
from tests.fleet.nodes import RealFleet, real_fleet, wait_for

SKEW_S = 5.0
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def fleet(task: Path) -> Iterator[RealFleet]:
    """A fleet of two nodes in its second attempt, of which only the leader has started."""
    with (
        tempfile.TemporaryDirectory(prefix="tasuki-") as name,
        places_of(2) as places,
        real_fleet(Path(name), places, base=task) as fleet,
    ):
        fleet.attempt = 1
        fleet.start(ranks=[0])
        wait_for(lambda: fleet.num_members() == 1)
        yield fleet


@pytest.fixture(scope="module")
def folder(fleet: RealFleet) -> Path:
    """Folder of mismatches for other nodes: another version of tasuki, another clock."""
    folder = fleet.nodes[0].state_dir.parent
    metadata = folder / "version" / "tasuki-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: tasuki\nVersion: 99.0\n")
    (folder / "clock").mkdir()
    ahead = f"import time\nnow, now_ns = time.time, time.time_ns\ntime.time = lambda: now() + {SKEW_S}\n"
    ahead += f"time.time_ns = lambda: now_ns() + int({SKEW_S} * 1e9)\n"
    (folder / "clock" / "sitecustomize.py").write_text(ahead)
    return folder


def start(fleet: RealFleet, name: str, *settings: str, environment: Mapping[str, str]) -> RealFleet:
    """Starts one more node, whose settings take precedence. Returns it alone, as a fleet."""
    node = fleet.nodes[1]
    folder = node.state_dir.parent
    state_dir = folder / name
    own = [*node.settings, *settings, f"state_dir={state_dir}"]
    other = replace(node, state_dir=state_dir, settings=own, log=folder / f"{name}.log", process=None)
    host, _, port = fleet.leader.rpartition(":")
    place = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": host, "MASTER_PORT": port, "TASUKI_FLEET": fleet.name}
    other.start({**place, "TASUKI_ATTEMPT": str(fleet.attempt), **environment}, grace_s=0.0)
    return RealFleet([other], fleet.leader)


def test_another_version_is_refused(fleet: RealFleet, folder: Path) -> None:
    other = start(fleet, "version-node", environment={"PYTHONPATH": str(folder / "version")})
    try:
        assert other.nodes[0].wait(90) == EXIT_REFUSED, other.logs()
    finally:
        other.stop()
    said = other.nodes[0].log.read_text()
    assert "rollout serves" not in said  # refused before its engine starts
    assert "FLEET_MISMATCH: fleet: version: node 1 has 99.0, the fleet has " in said
    assert fleet.num_members() == 1


def test_a_node_with_other_data_joins_and_the_doctor_sees_its_clock(fleet: RealFleet, folder: Path, task: Path) -> None:
    other = start(fleet, "data-node", "train.dataset=/elsewhere/rows.jsonl", environment={"PYTHONPATH": str(folder / "clock")})
    try:
        wait_for(lambda: fleet.num_members() == 2)
        time.sleep(5.0)  # a heartbeat is sent every 2 s
        judged = fleet.tasuki("doctor", task, "--set", f"state_dir={fleet.nodes[0].state_dir}", "--json", timeout_s=200)
        clock = next(one for one in json.loads(judged.stdout) if one["name"] == "fleet clock")
        assert clock["verdict"] == "warn", clock
        seen = re.fullmatch(r"node 1 \+(\d\.\d) s against node 0", clock["found"])
        assert seen is not None and SKEW_S - 1.0 < float(seen[1]) <= SKEW_S, clock
    finally:
        other.stop()
