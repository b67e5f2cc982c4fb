"""`tasuki train` looks at everything before it starts a node: each mistake is one line that names where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.client.step import Step
from tests.models import make_model, save_checkpoint

REWARD = "def reward(prompt, completion, **fields):\n    return 0.0\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "abc", "answer": "cba"}\n')
    (tmp_path / "my_reward.py").write_text(REWARD)
    path = tmp_path / "node.toml"
    path.write_text(
        f'state_dir = "node"\n[model]\npath = {json.dumps(str(model))}\n[rollout]\ncontext_length = 64\n'
        '[train]\ndataset = "train.jsonl"\noutput_dir = "run"\nmax_new_tokens = 32\n[train.reward]\nfunction = "my_reward:reward"\n'
    )
    return path


def _error(config: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What `tasuki train` says before it ends with the code of a user's mistake. No node was started, and nothing written."""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    assert main(["train", str(config), *arguments]) == USER_ERROR
    assert not (config.parent / "node").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "train.jsonl:2: not JSON"),
        ('{"text": "abc"}', "train.jsonl:2: lacks `prompt`"),
        (json.dumps({"prompt": "a" * 40}), "row 2: the prompt has 40 tokens; with train.max_new_tokens, at most 32 fit"),
        ('{"prompt": [{"role": "user", "content": "hi"}]}', "has no chat template"),
    ],
)
def test_a_bad_line_of_the_dataset_is_named(config: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str):
    with (config.parent / "train.jsonl").open("a") as lines:
        lines.write(line + "\n")
    assert problem in _error(config, capsys)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.dataset=/nowhere/train.jsonl", "/nowhere/train.jsonl does not exist"),
        ("train.eval_dataset=/nowhere/eval.jsonl", "/nowhere/eval.jsonl does not exist"),
        ("model.path=/nowhere", "/nowhere is not a folder"),
        ("train.reward.function=no_such_module:reward", "No module named 'no_such_module'"),
        ("train.reward.function=my_reward", "module:function"),
        ("train.stop_at_eval_score=0.9", "needs an eval_dataset"),
        ("train.group_size=0", "train.group_size"),
        ("train.max_new_tokens=-1", "train.max_new_tokens"),
        ("train.group_sice=8", "train.group_sice: unknown key"),
        ("train.max_new_tokens=64", "at most 0 fit"),
    ],
)
def test_a_bad_key_is_named(config: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str):
    assert problem in _error(config, capsys, override)


def test_an_earlier_run_is_not_overwritten(config: Path, capsys: pytest.CaptureFixture[str]):
    (config.parent / "run").mkdir()
    (config.parent / "run" / "summary.json").write_text("{}")
    assert "is there from an earlier run" in _error(config, capsys)


def test_a_file_without_a_train_table_cannot_be_trained(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(config.read_text().partition("[train]")[0])
    assert "no [train] table" in _error(config, capsys)


def test_seconds_of_a_steps_parts_add_up():
    step = Step(3)
    with step.timed("generate"), step.timed("reward"):
        pass
    with step.timed("generate"):
        pass
    assert step.seconds.keys() == {"generate", "reward"}
    assert step.total_seconds() == pytest.approx(sum(step.seconds.values()))
