"""Fleets of real nodes on the CPU: SGLang and FSDP over gloo. With root each node has its own network namespace."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.fleet import EXIT_FLEET_ENDED
from tests.fleet.network import places_of
from tests.fleet.nodes import real_fleet

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "client" / "examples" / "demo"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, DEMO / "make_task.py", folder / "task", "--seed", "0"], check=True)
    shutil.copy(ROOT / "deploy" / "config" / "demo.toml", folder / "demo.toml")
    shutil.copy(DEMO / "reward.py", folder / "reward.py")
    return folder / "demo.toml"


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


def test_a_lost_node_ends_all_with_the_fleets_exit_code(folder: Path, task: Path) -> None:
    with places_of(2) as places, real_fleet(folder, places, base=task) as fleet:
        fleet.start()
        fleet.wait_until_up()
        for node in fleet.nodes[1:]:
            assert node.process is not None
            node.process.send_signal(signal.SIGKILL)
        assert fleet.nodes[0].wait(60) == EXIT_FLEET_ENDED, fleet.logs()
