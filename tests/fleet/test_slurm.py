"""deploy/slurm/fleet.sbatch on a real Slurm: a run that loses a node is requeued and finishes; a run asked to stop saves."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki.cli import certs
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.wire.process_tree import descendants
from tests.fleet.slurm import NAMES, SlurmCluster, missing_tools, slurm_cluster

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6
LACKING = missing_tools()
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"needs Slurm (apt-get install slurm-wlm munge): lacks {', '.join(LACKING)}"),
    pytest.mark.timeout(900),
]
CONFIG = """
state_dir = "state"
device = "cpu"
listen = "0.0.0.0:50050"
[model]
path = "task/model"
[coordinator]
stage_timeout_s = 300
[trainer]
num_ranks = 1
compute_dtype = "float32"
learning_rate = 1.5e-3
[rollout]
dtype = "float32"
context_length = 64
engine.max_total_tokens = 16384
[fleet]
[security]
cert = "certs/node.pem"
key = "certs/node.key"
client_ca = "certs/ca.pem"
[train]
dataset = "task/train.jsonl"
output_dir = "run"
num_steps = {num_steps}
prompts_per_step = 8
group_size = 4
max_new_tokens = 6
save_every = 2
[train.reward]
function = "reward:exact"
"""


@pytest.fixture
def cluster(folder: Path, task: Path) -> Iterator[SlurmCluster]:
    shutil.copytree(task.parent / "task", folder / "task")
    shutil.copy(task.parent / "reward.py", folder / "reward.py")
    with slurm_cluster(folder) as cluster:
        addresses = [line.split()[0] for line in (folder / "hosts").read_text().splitlines()[1:]]
        assert certs.run(folder / "certs", hosts=[*NAMES, *addresses], days=1, is_fleet=True) == 0
        yield cluster


def submit(cluster: SlurmCluster, *, num_steps: int) -> str:
    (cluster.folder / "node.toml").write_text(CONFIG.format(num_steps=num_steps))
    script = ROOT / "deploy" / "slurm" / "fleet.sbatch"
    told = cluster.run("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", script, "node.toml")
    return told.strip()


def wait_for(is_so: Callable[[], bool], cluster: SlurmCluster, *, seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends, logs(cluster)
        time.sleep(0.5)


def logs(cluster: SlurmCluster) -> str:
    files = [*cluster.folder.glob("tasuki-*.log"), *cluster.folder.glob("tasuki-*/attempt-*/*")]
    return "".join(f"\n--- {file.relative_to(cluster.folder)}\n{file.read_text()[-1500:]}" for file in sorted(files))


def num_steps_of(cluster: SlurmCluster) -> int:
    metrics = cluster.folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def state_of(cluster: SlurmCluster, job: str) -> str:
    return cluster.job(job)["JobState"]


def test_a_job_that_loses_a_node_is_queued_again_and_ends(cluster: SlurmCluster) -> None:
    job = submit(cluster, num_steps=NUM_STEPS)
    wait_for(lambda: num_steps_of(cluster) >= 3, cluster)
    supervisor = holder(cluster.folder / "state-node-b", name=NODE_LOCK)
    assert supervisor
    lost = time.monotonic()
    # As on a machine that hangs: the job is not told, and remains must be ended before the next attempt.
    for pid in (supervisor, *descendants(supervisor)):
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", cluster)
    requeued_s = time.monotonic() - lost
    # Slurm delays a requeued job; an operator releases it.
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")
    wait_for(lambda: state_of(cluster, job) in ("COMPLETED", "FAILED", "CANCELLED"), cluster)
    assert state_of(cluster, job) == "COMPLETED", logs(cluster)
    summary = json.loads((cluster.folder / "run" / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    assert {path.name for path in cluster.folder.glob(f"tasuki-{job}/*")} == {"attempt-0", "attempt-1"}
    Path("runs/fleet").mkdir(parents=True, exist_ok=True)
    figures = {"requeued": requeued_s, "lost_until_end_of_run": time.monotonic() - lost}
    Path("runs/fleet/slurm.json").write_text(json.dumps(figures, indent=1) + "\n")


def test_a_job_that_is_asked_to_stop_saves_and_leaves_nothing(cluster: SlurmCluster) -> None:
    job = submit(cluster, num_steps=1000)
    wait_for(lambda: num_steps_of(cluster) >= 1, cluster)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: state_of(cluster, job) in ("COMPLETED", "FAILED", "CANCELLED"), cluster, seconds=150)
    assert state_of(cluster, job) == "COMPLETED", logs(cluster)
    saved = [int(path.name.removeprefix("version-")) for path in (cluster.folder / "run" / "checkpoints").glob("version-*")]
    assert max(saved) == num_steps_of(cluster)
    assert all(holder(cluster.folder / f"state-{name}", name=NODE_LOCK) is None for name in NAMES)


def test_a_job_that_is_refused_for_good_is_not_queued_again(cluster: SlurmCluster) -> None:
    (cluster.folder / "certs" / "node.key").write_text("no key")
    job = submit(cluster, num_steps=NUM_STEPS)
    wait_for(lambda: state_of(cluster, job) in ("COMPLETED", "FAILED", "CANCELLED"), cluster, seconds=150)
    shown = cluster.job(job)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "2:0", "0"), logs(cluster)
