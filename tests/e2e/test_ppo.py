"""PPO through a whole node: a critic, several mini-batches, dynamic sampling, in two runs after each other."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, RunningNode
from tests.e2e.conftest import CRITIC_LEARNING_RATE, CRITIC_STEPS
from tests.extent import IS_WHOLE
from tests.killed_client import write_task

pytestmark = pytest.mark.timeout(720)
LIMIT_S = 180.0
NUM_RUNS = 2 if IS_WHOLE else 1
Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(roomy: RunningNode, tmp_path: Path) -> Train:
    """Starts `tasuki train` on the node, with its output in `run`."""
    write_task(tmp_path)
    settings: dict[str, Any] = {
        "train.algorithm": "ppo", "train.num_mini_batches": 2, "train.num_epochs": 2, "train.max_batches": 3,
        "train.dataset": f"{tmp_path}/train.jsonl", "train.output_dir": f"{tmp_path}/run", "train.reward.function": "odd_reward:odd",
        "train.prompts_per_step": 3, "train.group_size": 4, "train.max_new_tokens": 6, "train.num_steps": CRITIC_STEPS,
        "train.top_k": 200,
    }  # fmt: skip

    def start(*options: str) -> subprocess.Popen[str]:
        arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        return subprocess.Popen(
            [sys.executable, "-m", "tasuki.cli", "train", str(roomy.config), *options, *arguments],
            cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


def _steps(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_policy_and_critic_learn_in_mini_batches_of_several_runs(train: Train, tmp_path: Path) -> None:
    rates: list[list[float]] = []
    for number in range(NUM_RUNS):
        with train() as done:
            text, _ = done.communicate(timeout=LIMIT_S)
        assert done.returncode == 0, text
        assert text.count("importance ratios are biased") == 1
        steps = _steps(tmp_path / "run")
        *learned, last = steps
        assert [step["step"] for step in learned] == list(range(CRITIC_STEPS))
        assert last["mean_reward"] is None
        assert all(step["num_policy_steps"] == 4 for step in learned)
        assert all(later["policy_version"] == step["policy_version"] + 4 for step, later in pairwise(steps))
        for step in learned:
            assert {"values", "old_log_probs", "critic"} <= step["seconds"].keys()
            assert {"critic/learning_rate", "critic/grad_norm", "inexact_fraction"} <= step["metrics"].keys()
            assert step["metrics"]["num_generated_groups"] >= 3
        rates.append([step["metrics"]["critic/learning_rate"] for step in learned])
        (tmp_path / "run").rename(tmp_path / f"run-{number}")
    assert rates == [pytest.approx([CRITIC_LEARNING_RATE] * CRITIC_STEPS)] * NUM_RUNS
