"""`tasuki train` checks a table [sft] and its files before it starts a node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.config.load import load_config
from tasuki.runs.sft_training import read_sft
from tests.models import make_model, save_checkpoint

TRAIN = '[train]\ndataset = "train.jsonl"\noutput_dir = "run"\nmax_new_tokens = 32\n[train.reward]\nfunction = "rewards:one"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "abc", "completion": "cba"}\n' * 5)
    path = tmp_path / "node.toml"
    path.write_text(
        f'state_dir = "node"\n[model]\npath = {json.dumps(str(model))}\n[trainer]\nmicro_batch_tokens = 64\n[rollout]\n'
        'context_length = 8\n[sft]\ndataset = "train.jsonl"\noutput_dir = "run"\nsamples_per_step = 2\n'
    )
    return path


def _error(config: Path, capsys: pytest.CaptureFixture[str], *overrides: str, options: Sequence[str] = ()) -> str:
    """Returns the error of `tasuki train`, which ends with a user error's exit code before any node starts."""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    assert main(["train", str(config), *options, *arguments]) == USER_ERROR
    assert not (config.parent / "node").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "train.jsonl:6: not JSON"),
        ('{"prompt": "abc"}', "train.jsonl:6: messages: missing; give `messages`, or `prompt` and `completion`"),
        (json.dumps({"prompt": "a" * 40, "completion": "b" * 40}), "train.jsonl:6: has 81 tokens; at most 64 fit"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "has no chat template"),
    ],
)
@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_a_bad_line_is_named(config: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str, key: str):
    file = config.parent / "train.jsonl"
    good = file.read_text()
    (config.parent / "good.jsonl").write_text(good)
    file.write_text(f"{good}{line}\n")
    other = "eval_dataset" if key == "dataset" else "dataset"
    overrides = [f'sft.{key}="{file}"', f'sft.{other}="{config.parent}/good.jsonl"']
    told = _error(config, capsys, *overrides)
    assert f"INVALID_ARGUMENT: sft.{key}: " in told and problem in told


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["sft.dataset=/nowhere/train.jsonl"], "sft.dataset: /nowhere/train.jsonl does not exist"),
        (["sft.max_tokens=65"], "sft.max_tokens: is 65, above trainer.micro_batch_tokens of 64"),
        (["sft.max_tokens=257", "trainer.micro_batch_tokens=512"], "sft.max_tokens: is 257, above the model's context length of 256"),
        (["sft.max_tokens=6"], "train.jsonl:1: has 7 tokens; at most 6 fit"),
        (["sft.num_steps=3", "sft.num_epochs=2"], "sft: give num_steps or num_epochs, not both"),
        (["sft.aggregation=constant"], "sft.aggregation"),
        (["trainer.critic.learning_rate=1e-5"], "trainer.critic is set, but [sft] trains only the policy"),
    ],
)  # fmt: skip
def test_a_bad_key_is_named(config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str):
    assert problem in _error(config, capsys, *overrides)


def test_a_file_with_both_tables_names_both(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(config.read_text() + TRAIN)
    assert "sft: the configuration has both [train] and [sft]" in _error(config, capsys)


@pytest.mark.parametrize(
    ("override", "num_steps", "key"),
    [(None, 3, "sft.num_epochs"), ("sft.num_epochs=4", 10, "sft.num_epochs"), ("sft.num_steps=4", 4, "sft.num_steps")],
)
def test_the_length_is_in_steps_or_in_epochs(config: Path, override: str | None, num_steps: int, key: str):
    loaded = load_config(config, overrides=[] if override is None else [override])
    assert loaded.sft is not None
    settings = read_sft(loaded, loaded.sft).settings
    assert (settings.num_steps, settings.length_key) == (num_steps, key)
