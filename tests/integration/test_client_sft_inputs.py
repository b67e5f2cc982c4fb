"""`tasuki train` checks a table [sft] and its files before it starts a node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.client.loop_state import LoopState, write_loop_state
from tasuki.client.step import Step
from tasuki.config.load import load_config
from tasuki.config.save import save_config
from tasuki.runs.earlier_run import RunHead, write_head
from tasuki.runs.folder import MetricsFile
from tasuki.runs.recipe import recipe
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
        (["sft.group_size=8"], "sft.group_size: unknown key"),
        (["trainer.critic.learning_rate=1e-5"], "trainer.critic is set, but [sft] trains only the policy"),
    ],
)  # fmt: skip
def test_a_bad_key_is_named(config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str):
    assert problem in _error(config, capsys, *overrides)


def test_a_file_with_both_tables_names_both(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(config.read_text() + TRAIN)
    assert "sft: the configuration has both [train] and [sft]" in _error(config, capsys)


def test_an_earlier_run_is_not_overwritten(config: Path, capsys: pytest.CaptureFixture[str]):
    (config.parent / "run").mkdir()
    (config.parent / "run" / "summary.json").write_text("{}")
    assert "sft.output_dir: " in _error(config, capsys)


@pytest.mark.parametrize(
    ("override", "num_steps", "key"),
    [(None, 3, "sft.num_epochs"), ("sft.num_epochs=4", 10, "sft.num_epochs"), ("sft.num_steps=4", 4, "sft.num_steps")],
)
def test_the_length_is_in_steps_or_in_epochs(config: Path, override: str | None, num_steps: int, key: str):
    loaded = load_config(config, overrides=[] if override is None else [override])
    assert loaded.sft is not None
    settings = read_sft(loaded, loaded.sft).settings
    assert (settings.num_steps, settings.length_key) == (num_steps, key)


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_the_longest_sample_is_of_both_files(config: Path, key: str):
    train, longer = config.parent / "train.jsonl", config.parent / "longer.jsonl"
    longer.write_text('{"prompt": "abcd", "completion": "dcba"}\n')
    loaded = load_config(config, overrides=[f'sft.eval_dataset="{train}"'])
    assert loaded.sft is not None
    assert read_sft(loaded, loaded.sft).longest_sample == 7
    loaded = load_config(config, overrides=[f'sft.eval_dataset="{train}"', f'sft.{key}="{longer}"'])
    assert loaded.sft is not None
    assert read_sft(loaded, loaded.sft).longest_sample == 9


def test_a_node_keeps_the_table_and_reads_it_again(config: Path, tmp_path: Path):
    loaded = load_config(config)
    save_config(loaded, tmp_path / "kept.toml")
    assert load_config(tmp_path / "kept.toml") == loaded


@pytest.fixture
def begun(config: Path) -> Path:
    """Output folder of a run interrupted after two steps, the last of which was saved."""
    output_dir = config.parent / "run"
    (output_dir / "checkpoints" / "version-000002").mkdir(parents=True)
    write_head(output_dir, RunHead("id", 0, recipe(load_config(config))))
    metrics = MetricsFile(output_dir)
    for number in range(2):
        metrics.report(Step(number, policy_version=number, num_policy_steps=1))
    position = {"seed": 0, "epoch": 0, "next": 4, "num_rows": 5}
    write_loop_state(output_dir / "checkpoints" / "version-000002", LoopState(metrics.steps[-1], position))
    return output_dir


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sft.seed=1", "sft.seed: is 1, but the run was started with 0"),
        ("sft.samples_per_step=3", "sft.samples_per_step: is 3, but the run was started with 2"),
        ("trainer.learning_rate=0.5", "trainer.learning_rate: is 0.5"),
        ("sft.num_steps=1", "sft.num_steps: makes 1 steps, but the run has done 2"),
    ],
)
def test_a_key_that_a_run_cannot_be_resumed_with_is_named(
    config: Path, begun: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str
):
    assert problem in _error(config, capsys, override, options=["--resume"])
    assert (begun / "metrics.jsonl").exists()


def test_a_run_of_the_other_table_is_not_resumed(config: Path, begun: Path, capsys: pytest.CaptureFixture[str]):
    (config.parent / "train.jsonl").write_text('{"prompt": "abc"}\n')
    config.write_text(config.read_text().partition("[sft]")[0].replace("context_length = 8", "context_length = 64") + TRAIN)
    assert f"the run in {begun} was not started with [train]" in _error(config, capsys, options=["--resume"])


def test_a_run_that_has_ended_is_left_as_it_is(config: Path, begun: Path, capsys: pytest.CaptureFixture[str]):
    metrics = MetricsFile(begun)
    for number in range(4):
        metrics.report(Step(number, policy_version=number, num_policy_steps=int(number < 3)))
    for name in ("summary.json", "model"):
        (begun / name).write_text("")
    assert main(["train", str(config), "--resume"]) == 0
    assert "has finished; to continue, raise sft.num_epochs" in capsys.readouterr().out
    assert not (config.parent / "node").exists()
