"""The agent of the examples learns to use its tool, as a function and on OpenAI's SDK."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, ROOT, assert_clean_audit


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [[], ["--server", "openai_server.py"]], ids=["function", "openai"])
def test_the_agent_learns_to_look_up_what_it_cannot_know(tmp_path: Path, options: list[str]):
    argv = [sys.executable, "client/examples/agent/run.py", str(tmp_path / "agent"), *options]
    ran = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False)
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((tmp_path / "agent" / "summary.json").read_text())
    steps = [json.loads(line) for line in (tmp_path / "agent" / "metrics.jsonl").read_text().splitlines()]
    turns = [step["metrics"]["episode/turns"] for step in steps if "episode/turns" in step["metrics"]]
    assert turns[-1] > turns[0] + 0.3, ran.stdout
    assert summary["eval_score_after"] >= 0.8, ran.stdout
    assert steps[0]["mean_reward"] < 0.5
    assert summary["log_prob_gap_max"] < 1e-4
    assert_clean_audit(tmp_path / "agent" / "node")
