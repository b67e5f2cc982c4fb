"""A scheduler's actions on a fleet: SIGTERM, a lost node, another attempt. The run ends with the figures of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.fleet import INTERRUPTED
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.node.services import EXIT_FLEET_ENDED
from tasuki.wire.process_tree import descendants
from tests.conftest import ENVIRONMENT
from tests.fleet.network import places_of
from tests.fleet.nodes import RealFleet, real_fleet

NUM_STEPS = 6
SHORT = (
    f"train.num_steps={NUM_STEPS}",
    "train.prompts_per_step=8",
    "train.group_size=4",
    "train.save_every=2",
    "train.eval_every=100",
)
pytestmark = pytest.mark.timeout(900)


def train(fleet: RealFleet, task: Path, run: Path, *, log: Path) -> subprocess.Popen[bytes]:
    settings = (f"state_dir={fleet.nodes[0].state_dir}", f"train.output_dir={run}", "trainer.num_ranks=1", *SHORT)
    argv = [*fleet.nodes[0].place.prefix, sys.executable, "-m", "tasuki.cli", "train", task, "--resume", "--no-start"]
    argv += [part for setting in settings for part in ("--set", setting)]
    with log.open("ab") as output:
        return subprocess.Popen(argv, env=ENVIRONMENT, stdout=output, stderr=output)


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(run: Path, number: int, process: subprocess.Popen[bytes], *, log: Path) -> None:
    ends = time.monotonic() + 200
    while len(steps_of(run)) < number:
        assert process.poll() is None and time.monotonic() < ends, log.read_text()
        time.sleep(0.1)


def restart(fleet: RealFleet) -> None:
    """Restarts the fleet as deploy/slurm/fleet.sbatch does: stops remains of the last attempt, then starts all nodes as the next."""
    for node in fleet.nodes:
        stopped = fleet.tasuki("down", "--state-dir", node.state_dir, rank=node.rank)
        assert holder(node.state_dir, name=NODE_LOCK) is None, stopped.stderr
    fleet.attempt += 1
    fleet.start()
    fleet.wait_until_up()


def freeze(fleet: RealFleet, rank: int) -> list[int]:
    """Stops every process of a node, as on a machine that hangs."""
    supervisor = holder(fleet.nodes[rank].state_dir, name=NODE_LOCK)
    assert supervisor
    frozen = [supervisor, *descendants(supervisor)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    return frozen


def figures(step: dict[str, Any]) -> dict[str, float]:
    """Figures of a step, without its seconds."""
    named = {name: step[name] for name in ("step", "policy_version", "mean_reward", "grad_norm", "learning_rate")}
    return {**named, **{name: value for name, value in step["metrics"].items() if "seconds" not in name}}


def test_a_run_that_is_stopped_and_loses_a_node_ends_as_one_that_does_not(folder: Path, task: Path) -> None:
    run, undisturbed, log = folder / "run", folder / "undisturbed", folder / "train.log"
    with places_of(2) as places, real_fleet(folder, places, base=task, settings=[f"train.output_dir={folder}"]) as fleet:
        fleet.grace_s = 60.0
        fleet.start()
        fleet.wait_until_up()
        training = train(fleet, task, run, log=log)
        wait_for_steps(run, 1, training, log=log)
        # The scheduler reclaims the machines: the run saves, and node 0 stays up until it has.
        for node in fleet.nodes:
            node.signal(signal.SIGTERM)
        training.send_signal(signal.SIGUSR1)
        assert training.wait(60) == INTERRUPTED, log.read_text()
        assert fleet.nodes[0].wait(30) == INTERRUPTED, fleet.logs()
        saved = len(steps_of(run))
        assert any((run / "checkpoints").glob("version-*"))

        restart(fleet)
        training = train(fleet, task, run, log=log)
        wait_for_steps(run, saved + 2, training, log=log)
        frozen = freeze(fleet, 1)
        lost = time.monotonic()
        assert fleet.nodes[0].wait(60) == EXIT_FLEET_ENDED, fleet.logs()
        ended_s = time.monotonic() - lost
        assert training.wait(60) not in (0, INTERRUPTED)
        fleet.nodes[1].signal(signal.SIGKILL)

        restart(fleet)
        assert not [pid for pid in frozen if Path(f"/proc/{pid}").exists()]
        assert train(fleet, task, run, log=log).wait(300) == 0, log.read_text()
        seconds = {"ended": ended_s, "lost_until_end_of_run": time.monotonic() - lost}

        restart(fleet)
        assert train(fleet, task, undisturbed, log=log).wait(300) == 0, log.read_text()
        assert [figures(step) for step in steps_of(run)] == [pytest.approx(figures(step)) for step in steps_of(undisturbed)]
        for node in fleet.nodes:
            audited = fleet.tasuki("audit", node.state_dir, rank=node.rank)
            assert audited.returncode == 0, audited.stdout + audited.stderr
    Path("runs/fleet").mkdir(parents=True, exist_ok=True)
    Path("runs/fleet/restart.json").write_text(json.dumps(seconds, indent=1) + "\n")
