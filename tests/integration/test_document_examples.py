"""Examples of README.md and docs/ that need no node: rewards, losses, configuration, imports, and commands on a run's files."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tasuki.client
from tasuki.algorithms.loss_types import LossConfig
from tasuki.cli.__main__ import main
from tasuki.client.encode import loss_to_proto
from tasuki.config.load import load_config
from tasuki.trainer.ranks.loss import decode_loss
from tests.conftest import ENVIRONMENT, ROOT
from tests.dashboard import RECORDED
from tests.unit.test_plan_cli import CONFIG

REWARD_ARGUMENTS = """
from pathlib import Path
from tasuki.client import FinishReason
from tasuki.client.rewards import Completion
rows = [{"prompt": "1 + 1", "answer": "2", "source": "ours"}]
texts = ["2", "3", "<answer>2", "2"] * 2
completions = [Completion(text, FinishReason.STOP, token_ids=[1], prompt_token_ids=[2]) for text in texts]
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def block(page: str, containing: str) -> str:
    return next(text for text in blocks(page, "python") if containing in text)


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rewards_of_the_clients_page_are_summed_by_weight(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(block("docs/client.md", "def tagged("))
    pool = block("docs/client.md", "rewards = RewardPool(")
    told = run(
        f"{REWARD_ARGUMENTS}{pool}rewards.close()\nprint([round(float(reward), 1) for reward in scores.rewards[:4]])", tmp_path
    )
    assert told == "[1.0, 0.0, 0.2, 1.0]"


def test_reward_of_the_readme_works(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(block("README.md", "def exact("))
    program = f"""{REWARD_ARGUMENTS}
from tasuki.client import RewardPool
with RewardPool("rewards:exact", folders=[Path.cwd()]) as pool:
    print(pool.score(rows, texts[:2], group_size=2).rewards.tolist())
"""
    assert run(program, tmp_path) == "[1.0, 0.0]"


def test_losses_of_the_clients_page_cross_the_wire() -> None:
    tree = ast.parse(block("docs/client.md", "GspoLoss("))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "LossConfig"]
    assert len(calls) == 2
    for call in calls:
        config = eval(ast.unparse(call), dict(vars(tasuki.client)))
        assert isinstance(config, LossConfig)
        assert decode_loss(loss_to_proto(config)) == config


def test_configuration_of_the_readme_is_valid(tmp_path: Path) -> None:
    (config,) = blocks("README.md", "toml")
    (tmp_path / "node.toml").write_text(config)
    train = load_config(tmp_path / "node.toml").train
    assert train is not None and train.reward.function == "rewards:exact"


@pytest.mark.parametrize("page", ["README.md", "docs/client.md"])
def test_imports_of_the_page_work(page: str, tmp_path: Path) -> None:
    lines = [line for text in blocks(page, "python") for line in text.splitlines() if line.startswith("from tasuki")]
    assert lines
    run("\n".join(lines), tmp_path)


@pytest.fixture
def run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with everything that the pages name: the README's node, its data and model, and a finished run."""
    for folder in ("node", "runs/first", "runs/demo"):
        shutil.copytree(RECORDED, tmp_path / folder)
    samples = tmp_path / "runs" / "demo" / "samples"
    shutil.copy(samples / "step-000008.jsonl", samples / "step-000012.jsonl")
    shutil.copy(RECORDED / "journal.sqlite", tmp_path)
    model = tmp_path / "models" / "my-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "node.toml").write_text(blocks("README.md", "toml")[0])
    (tmp_path / "rewards.py").write_text(block("README.md", "def exact("))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", ["audit", "plan", "changeover", "client", "ports"])
def test_commands_of_the_page_work_as_they_stand(page: str, run_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for text in blocks(f"docs/{page}.md", "sh") for line in text.splitlines()]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program == "tasuki":
            assert main(arguments) == 0, line
            assert "".join(capsys.readouterr()), line
        elif shutil.which("openssl" if "openssl" in line else program):
            subprocess.run(line, shell=True, check=True, timeout=60)
