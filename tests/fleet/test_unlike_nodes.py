"""Nodes that do not match their fleet, each started beside a real leader: refused by name, or reported by the doctor."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.cli import certs
from tests.fleet.network import places_of
from tests.fleet.nodes import RealFleet, real_fleet, wait_for

REFUSED = 2
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
def folder(fleet: RealFleet, task: Path) -> Path:
    """Folder of mismatches for other nodes: another version of tasuki, clock, model, and other certificates."""
    folder = fleet.nodes[0].state_dir.parent
    metadata = folder / "version" / "tasuki-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: tasuki\nVersion: 99.0\n")
    (folder / "clock").mkdir()
    ahead = f"import time\nnow, now_ns = time.time, time.time_ns\ntime.time = lambda: now() + {SKEW_S}\n"
    ahead += f"time.time_ns = lambda: now_ns() + int({SKEW_S} * 1e9)\n"
    (folder / "clock" / "sitecustomize.py").write_text(ahead)
    shutil.copytree(task.parent / "task" / "model", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert certs.run(folder / "others", hosts=[fleet.nodes[1].place.host, "localhost"], days=1, is_fleet=True) == 0
    return folder


def start(fleet: RealFleet, name: str, *settings: str, rank: int = 1, environment: Mapping[str, str] = {}) -> RealFleet:
    """Starts one more node, whose settings take precedence. Returns it alone, as a fleet."""
    node = fleet.nodes[rank]
    folder = node.state_dir.parent
    state_dir = folder / name
    own = [*node.settings, *settings, f"state_dir={state_dir}"]
    other = replace(node, state_dir=state_dir, settings=own, log=folder / f"{name}.log", process=None)
    host, _, port = fleet.leader.rpartition(":")
    place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": host, "MASTER_PORT": port, "TASUKI_FLEET": fleet.name}
    other.start({**place, "TASUKI_ATTEMPT": str(fleet.attempt), **environment}, grace_s=0.0)
    return RealFleet([other], fleet.leader)


def refusal(fleet: RealFleet, name: str, *settings: str, **given: object) -> str:
    """Returns the log of a node that is refused for good, before its engine starts."""
    other = start(fleet, name, *settings, **given)
    try:
        assert other.nodes[0].wait(90) == REFUSED, other.logs()
    finally:
        other.stop()
    said = other.nodes[0].log.read_text()
    assert "rollout serves" not in said
    assert fleet.num_members() == 1
    return said


def test_another_version_is_refused(fleet: RealFleet, folder: Path) -> None:
    said = refusal(fleet, "version-node", environment={"PYTHONPATH": str(folder / "version")})
    assert "FLEET_MISMATCH: fleet: version: node 1 has 99.0, the fleet has " in said


def test_another_model_is_refused(fleet: RealFleet, folder: Path) -> None:
    said = refusal(fleet, "model-node", f"model.path={folder}/model")
    assert "FLEET_MISMATCH: fleet: model_digest: node 1 has a different model from the leader; give all nodes the same" in said


def test_another_number_of_ranks_is_refused(fleet: RealFleet) -> None:
    said = refusal(fleet, "ranks-node", "trainer.num_ranks=2")
    assert "FLEET_MISMATCH: fleet: num_ranks: node 1 has 2, the fleet has 1" in said


def test_a_node_of_an_older_attempt_is_refused(fleet: RealFleet) -> None:
    said = refusal(fleet, "late-node", environment={"TASUKI_ATTEMPT": "0"})
    assert "STALE_EPOCH: fleet: node 1 belongs to attempt 0 of the job and the leader to 1; stop the node" in said


def test_a_node_whose_certificate_the_leader_does_not_take_is_refused(fleet: RealFleet, folder: Path) -> None:
    own = (f"security.cert={folder}/others/node.pem", f"security.key={folder}/others/node.key")
    said = refusal(fleet, "unsigned-node", *own)
    assert "security.cert: the leader at" in said and "does not take this node's certificate" in said


def test_a_second_leader_is_refused_at_once(fleet: RealFleet) -> None:
    started = time.monotonic()
    own = ("coordinator.listen=unix", "trainer.listen=unix", "rollout.listen=unix")
    said = refusal(fleet, "second-leader", *own, rank=0)
    seconds = time.monotonic() - started
    assert "NODE_RUNNING: fleet.leader: node 0 cannot serve on" in said and "coordinator serves" not in said
    assert seconds < 30


def test_a_node_with_other_data_joins_and_the_doctor_sees_its_clock(fleet: RealFleet, folder: Path, task: Path) -> None:
    other = start(fleet, "data-node", "train.dataset=/elsewhere/rows.jsonl", environment={"PYTHONPATH": str(folder / "clock")})
    try:
        wait_for(lambda: fleet.num_members() == 2)
        time.sleep(5.0)  # a heartbeat is sent every 2 s
        judged = fleet.tasuki("doctor", task, "--set", f"state_dir={fleet.nodes[0].state_dir}", "--json", timeout_s=200)
        clock = next(one for one in json.loads(judged.stdout) if one["name"] == "fleet clock")
        assert clock["verdict"] == "warn", clock
        seen = re.fullmatch(r".* against node 0, .*; node 1 \+(\d\.\d) s", clock["found"])
        assert seen is not None and SKEW_S - 1.0 < float(seen[1]) <= SKEW_S, clock
    finally:
        other.stop()
