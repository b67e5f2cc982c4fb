"""PPO with a critic on the demo's task: killing trainer ranks in the middle of updates changes no figure of the run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, ROOT
from tests.pulses import pids

pytestmark = pytest.mark.timeout(1800)
NUM_STEPS = 12
SETTINGS = [
    "train.algorithm=ppo",
    "trainer.critic.learning_rate=3e-3",
    f"train.num_steps={NUM_STEPS}",
    f"train.eval_every={NUM_STEPS}",
    "train.save_every=4",
]
# Rank to kill, by the step whose updates it is killed in: before the first checkpoint, and after one.
KILLS = {2: 1, 6: 0}
LIMIT_S = 800.0


def _start(output: Path) -> subprocess.Popen[str]:
    overrides = [argument for setting in SETTINGS for argument in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, ROOT / "client/examples/demo/run.py", "--seed", "0", "--output", output, *overrides],
        env=ENVIRONMENT,
        stdout=(output.parent / f"{output.name}.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finished(output: Path, process: subprocess.Popen[str]) -> None:
    returncode = process.wait(timeout=LIMIT_S)
    assert returncode == 0, (output.parent / f"{output.name}.log").read_text()[-4000:]


def _kill_in_update(output: Path, process: subprocess.Popen[str], *, step: int, rank: int) -> None:
    """Kills the rank after the step's advantages are known, while policy and critic are updated."""
    pending = output / "pending.json"
    deadline = time.monotonic() + LIMIT_S
    while not (pending.exists() and json.loads(pending.read_bytes())["step"]["step"] >= step):
        assert process.poll() is None and time.monotonic() < deadline, f"step {step} was not begun"
        time.sleep(0.002)
    (pid,) = pids(output / "node", f"trainer{rank}")
    os.kill(pid, signal.SIGKILL)


def _figures(output: Path) -> list[dict[str, Any]]:
    """Figures of every step, without durations."""
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in step.items() if name not in ("seconds", "stage_seconds")} for step in steps]


def _digest(output: Path) -> str:
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_killed_trainer_ranks_change_neither_score_nor_model(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    with _start(undisturbed) as process:
        _finished(undisturbed, process)
    with _start(killed) as process:
        for step, rank in KILLS.items():
            _kill_in_update(killed, process, step=step, rank=rank)
        _finished(killed, process)
    log = (killed / "node" / "logs" / "supervisor.log").read_text()
    assert log.count("event=started service=trainer") == 1 + len(KILLS), log
    assert _figures(killed) == _figures(undisturbed)
    assert _digest(killed) == _digest(undisturbed)
    scores = [json.loads((output / "summary.json").read_text())["eval_score_after"] for output in (undisturbed, killed)]
    assert scores[0] == scores[1] > 0.5
