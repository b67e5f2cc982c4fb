"""A training run whose client was killed, resumed on the node that goes on without it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, RunningNode

pytestmark = pytest.mark.timeout(240)
NUM_STEPS = 8
LIMIT_S = 120.0
REWARD = "def odd(prompt, completion, **fields):\n    return float(len(set(completion)) % 2)\n"
Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(node: RunningNode, tmp_path: Path) -> Train:
    """Starts `tasuki train` on the node, with its output in `run`."""
    (tmp_path / "odd_reward.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": letter * 4}) + "\n" for letter in "abcdefgh"))
    settings = {
        "train.dataset": f"{tmp_path}/train.jsonl", "train.output_dir": f"{tmp_path}/run", "train.reward.function": "odd_reward:odd",
        "train.prompts_per_step": 3, "train.group_size": 6, "train.max_new_tokens": 6, "train.num_steps": NUM_STEPS,
        "train.save_every": 2,
    }  # fmt: skip

    def start(*options: str) -> subprocess.Popen[str]:
        arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        return subprocess.Popen(
            [sys.executable, "-m", "tasuki.cli", "train", str(node.config), *options, *arguments],
            cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


def test_a_killed_client_is_resumed_without_a_step_lost_or_told_twice(train: Train, tmp_path: Path) -> None:
    with train() as killed:
        assert killed.stdout is not None
        lines = [line for line in iter(killed.stdout.readline, "") if not _kill_at(line, "step   4", killed)]
    assert killed.returncode == -signal.SIGKILL, "".join(lines)
    with train("--resume") as resumed:
        text, _ = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, text
    assert "resuming from the node's own policy version" in text
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(NUM_STEPS + 1))
    for step, later in pairwise(steps):
        assert later["policy_version"] == step["policy_version"] + step["num_policy_steps"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["policy_version"] == steps[-1]["policy_version"]


def test_a_run_whose_groups_all_agree_saves_what_is_due_and_once(train: Train, tmp_path: Path) -> None:
    (tmp_path / "odd_reward.py").write_text("def odd(prompt, completion, **fields):\n    return 1.0\n")
    with train() as done:
        text, _ = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, text
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"version-{steps[0]['policy_version']:06d}"
    assert json.loads((checkpoint / "loop.json").read_text())["step"]["step"] == 1


def _kill_at(line: str, start: str, process: subprocess.Popen[str]) -> bool:
    if line.startswith(start):
        process.kill()
    return line.startswith(start)
