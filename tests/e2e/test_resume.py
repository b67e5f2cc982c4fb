"""A training run whose client was killed, resumed on the node, which has kept running."""

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, RunningNode
from tests.killed_client import write_task

pytestmark = pytest.mark.timeout(240)
NUM_STEPS = 8
LIMIT_S = 120.0


def train(node: RunningNode, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts `tasuki train` on the node, with its output below `folder`."""
    settings = {
        "train.dataset": f"{folder}/train.jsonl", "train.output_dir": f"{folder}/run", "train.reward.function": "odd_reward:odd",
        "train.prompts_per_step": 3, "train.group_size": 6, "train.max_new_tokens": 6, "train.num_steps": NUM_STEPS,
        "train.save_every": 2,
    }  # fmt: skip
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
    return subprocess.Popen(
        [sys.executable, "-m", "tasuki.cli", "train", str(node.config), *options, *arguments],
        cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_killed_client_is_resumed_without_a_step_lost_or_told_twice(node: RunningNode, tmp_path: Path) -> None:
    with train(node, write_task(tmp_path)) as killed:
        assert killed.stdout is not None
        lines = [line for line in iter(killed.stdout.readline, "") if not _kill_at(line, "step   4", killed)]
    assert killed.returncode == -signal.SIGKILL, "".join(lines)
    with train(node, tmp_path, "--resume") as resumed:
        text, _ = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, text
    assert "resuming from the node's own policy version" in text
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(NUM_STEPS + 1))
    for step, later in pairwise(steps):
        assert later["policy_version"] == step["policy_version"] + step["num_policy_steps"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["policy_version"] == steps[-1]["policy_version"]


def _kill_at(line: str, start: str, process: subprocess.Popen[str]) -> bool:
    if line.startswith(start):
        process.kill()
    return line.startswith(start)
