"""Fleets of real nodes on the CPU: SGLang, and FSDP over gloo. With root each node has a separate network namespace."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.node.services import EXIT_FLEET_ENDED
from tasuki.wire.process_tree import parent_and_state
from tests.fleet.network import can_make_namespaces, places_of
from tests.fleet.nodes import real_fleet
from tests.limits import wait_for

pytestmark = pytest.mark.timeout(1800)


def test_the_demo_learns_on_two_nodes_as_on_one(folder: Path, task: Path) -> None:
    run = folder / "run"
    with places_of(2) as places, real_fleet(folder, places, base=task, settings=[f"train.output_dir={run}"]) as fleet:
        fleet.start()
        fleet.wait_until_up()
        before = [place.received_bytes() for place in places]
        trained = fleet.tasuki(
            "train", task, "--no-start", "--set", f"state_dir={fleet.nodes[0].state_dir}", "--set", f"train.output_dir={run}",
            "--set", "trainer.num_ranks=1", timeout_s=1200,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stderr + fleet.logs()
        summary = json.loads((run / "summary.json").read_text())
        assert summary["eval_score_after"] >= 0.985, summary
        crossed = [place.received_bytes() - earlier for place, earlier in zip(places, before, strict=True)]
        assert all(crossed)


@pytest.mark.parametrize("when", ["starting", "up"])
def test_a_lost_node_ends_all_with_the_fleets_exit_code(folder: Path, task: Path, when: str) -> None:
    with places_of(2) as places, real_fleet(folder, places, base=task) as fleet:
        fleet.start()
        if when == "up":
            fleet.wait_until_up()
        else:
            wait_for(lambda: fleet.num_members() == 2, 120)
            assert "the node is up" not in fleet.nodes[0].log.read_text()
        fleet.nodes[1].signal(signal.SIGKILL)
        assert fleet.nodes[0].wait(60) == EXIT_FLEET_ENDED, fleet.logs()


def test_a_node_whose_processes_are_killed_asks_for_another_attempt(folder: Path, task: Path) -> None:
    with places_of(2) as places, real_fleet(folder, places, base=task) as fleet:
        fleet.start()
        fleet.wait_until_up()
        supervisor = holder(fleet.nodes[1].state_dir, name=NODE_LOCK)
        assert supervisor
        guard = parent_and_state(supervisor)[0]
        for pid in (guard, supervisor):
            os.kill(pid, signal.SIGKILL)
        assert [node.wait(60) for node in fleet.nodes] == [EXIT_FLEET_ENDED] * 2, fleet.logs()


@pytest.mark.skipif(not can_make_namespaces(), reason="one namespace has one loopback interface")
def test_trainers_that_do_not_reach_each_other_end_both_nodes_in_time_and_ask_for_another_attempt(folder: Path, task: Path):
    settings = ["coordinator.stage_timeout_s=60"]
    with places_of(2) as places:
        alone = [replace(place, interface="lo") for place in places]
        with real_fleet(folder, alone, base=task, settings=settings) as fleet:
            fleet.start()
            assert [node.wait(180) for node in fleet.nodes] == [EXIT_FLEET_ENDED] * 2, fleet.logs()
            named = [node for node in fleet.nodes if "set fleet.interface to a network" in node.log.read_text()]
            assert named, fleet.logs()


def test_a_node_that_its_operator_stops_asks_for_no_other_attempt_and_the_others_learn_why(folder: Path, task: Path) -> None:
    with places_of(2) as places, real_fleet(folder, places, base=task) as fleet:
        fleet.start(ranks=[0])
        wait_for(lambda: "waiting for node 1 of 2 to join" in fleet.nodes[0].log.read_text(), 120)
        fleet.start(ranks=[1])
        wait_for(lambda: fleet.num_members() == 2, 120)
        fleet.tasuki("down", "--state-dir", fleet.nodes[1].state_dir)
        assert [node.wait(60) for node in fleet.nodes] == [EXIT_FLEET_ENDED, 0], fleet.logs()
        assert "FLEET_ENDED: fleet: the fleet has ended: node 1 was stopped by its operator" in fleet.nodes[0].log.read_text()
