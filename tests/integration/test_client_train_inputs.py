"""`tasuki train` checks either table before it starts a node: each mistake gives one line that says where it is."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.client.loop_state import LoopState, write_loop_state
from tasuki.client.step import Step
from tasuki.config.load import load_config, save_config
from tasuki.config.lock import TRAINING_LOCK, StateLock
from tasuki.config.paths import journal_path, training_log_path
from tasuki.node.start import check_state_folder
from tasuki.runs.earlier_run import RunHead, write_head
from tasuki.runs.folder import MetricsFile, read_steps
from tasuki.runs.recipe import recipe
from tasuki.runs.rl_training import read_rl
from tasuki.runs.sft_training import read_sft
from tasuki.wire.errors import InvalidArgument
from tests.models import make_model, save_checkpoint
from tests.owners import give_away

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


def _error(
    config: Path, capsys: pytest.CaptureFixture[str], *overrides: str, options: Sequence[str] = (), command: str = "train"
) -> str:
    """Returns the error of a command, which ends with a user error's exit code before a node starts or a file is written."""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    assert main([*command.split(), str(config), *options, *arguments]) == USER_ERROR
    assert not (config.parent / "node").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "abc"}', "train.jsonl:3: lacks `prompt`"),
        (
            json.dumps({"prompt": "a" * 40}),
            "train.jsonl:3: the prompt has 40 tokens; with train.max_new_tokens, at most 32 fit",
        ),
        ('{"prompt": [{"role": "user", "content": "hi"}]}', "has no chat template"),
        ('{"prompt": "abc"}', "takes `answer`, but {folder}/train.jsonl:3 has only prompt"),
    ],
)
def test_a_bad_line_of_the_dataset_is_named(config: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str):
    (config.parent / "my_reward.py").write_text("def reward(completion, answer):\n    return 0.0\n")
    add_line(config, line)
    assert problem.format(folder=config.parent) in _error(config, capsys)


def add_line(config: Path, line: str) -> None:
    with (config.parent / "train.jsonl").open("a") as lines:
        lines.write("\n" + line + "\n")


def test_every_command_judges_the_dataset(config: Path, capsys: pytest.CaptureFixture[str]):
    add_line(config, "{}")
    place = ("--name", "a", "--num-nodes", "1", "--node-rank", "0", "--leader", "localhost:29400")
    for command, options in {"plan": (), "up": (), "fleet up": place}.items():
        assert "train.jsonl:3: lacks `prompt`" in _error(config, capsys, command=command, options=options)
    main(["doctor", str(config), "--json"])
    assert "train.jsonl:3: lacks `prompt`" in capsys.readouterr().out


def test_a_runs_own_configuration_finds_the_rewards_from_where_it_began(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As `tasuki up RUN/run.toml --resume` is told to continue it."""
    output_dir = config.parent / "run"
    output_dir.mkdir()
    save_config(load_config(config), output_dir / "run.toml")
    monkeypatch.chdir("/")
    assert main(["plan", str(output_dir / "run.toml")]) == USER_ERROR
    assert "No module named 'my_reward'" in capsys.readouterr().err
    write_head(output_dir, RunHead("a", 0, recipe={}, provenance={"config_dir": str(config.parent)}))
    main(["plan", str(output_dir / "run.toml")])
    assert "train.dataset has 1 rows that can be trained" in capsys.readouterr().err


def test_the_longest_sample_is_the_longest_prompt_with_a_whole_completion(config: Path):
    (config.parent / "train.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "abcdefg"}\n{"prompt": "a"}\n')
    assert read_rl(load_config(config)).longest_sample == 7 + 32


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.dataset=/nowhere/train.jsonl", "/nowhere/train.jsonl does not exist"),
        ("train.eval_dataset=/nowhere/eval.jsonl", "/nowhere/eval.jsonl does not exist"),
        ("model.path=/nowhere", "/nowhere is not a folder"),
        ("train.reward.function=no_such_module:reward", "No module named 'no_such_module'"),
        ("train.output_dir=/dev/null/run", "train.output_dir: /dev/null/run cannot be created: Not a directory"),
        ("state_dir=/dev/null/node", "state_dir: /dev/null/node cannot be created: Not a directory"),
        ("train.max_new_tokens=64", "train.max_new_tokens: is 64, which leaves no room for a prompt"),
        ("train.max_new_tokens=100000", "prompt plus completion may have 64 tokens"),
        (
            "train.max_prompt_tokens=2",
            "train.max_prompt_tokens: is 2, but {folder}/train.jsonl:1: the prompt has 3 tokens; raise it",
        ),
        ("train.stop_token_ids=[131]", "train.stop_token_ids: 131 is not a token id of the model; give 0 to 130"),
    ],
)
def test_a_bad_key_is_named(config: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str):
    assert problem.format(folder=config.parent) in _error(config, capsys, override)


def test_what_a_run_makes_in_a_new_state_folder_is_no_users_file(config: Path):
    node = load_config(config, overrides=[f"train.output_dir={config.parent / 'node' / 'run 1'}"])
    node.state_dir.mkdir()
    StateLock.take(node.state_dir, name=TRAINING_LOCK).close()
    StateLock.take(node.state_dir / "run 1", name=TRAINING_LOCK).close()
    check_state_folder(node)
    (node.state_dir / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="contains files of something else"):
        check_state_folder(node)


def test_a_state_folder_that_another_user_controls_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch):
    node = load_config(config)
    node.state_dir.mkdir(mode=0o755)
    check_state_folder(node)
    node.state_dir.chmod(0o777)
    with pytest.raises(InvalidArgument, match="chmod o-w"):
        check_state_folder(node)
    give_away(node.state_dir, monkeypatch)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        check_state_folder(node)


def test_an_earlier_run_is_not_overwritten(config: Path, capsys: pytest.CaptureFixture[str]):
    (config.parent / "run").mkdir()
    (config.parent / "run" / "summary.json").write_text("{}")
    assert "exists from an earlier run" in _error(config, capsys)


@pytest.mark.parametrize("folder", ["run", "node"])
@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_one_run_at_a_time_has_an_output_folder_and_a_node(
    config: Path, capsys: pytest.CaptureFixture[str], folder: str, options: list[str]
):
    with StateLock.take(config.parent / folder, name=TRAINING_LOCK):
        assert main(["train", str(config), *options]) == USER_ERROR
        assert not journal_path(config.parent / "node").exists()
    error = capsys.readouterr().err
    assert f"NODE_RUNNING: pid {os.getpid()} already runs a training on {config.parent / folder}" in error


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_run_that_may_start_no_node_says_that_none_runs_and_leaves_the_last_one_as_it_was(
    config: Path, capsys: pytest.CaptureFixture[str], options: list[str]
):
    log = training_log_path(config.parent / "node")
    log.parent.mkdir()
    log.write_bytes(b"learned")
    assert main(["train", str(config), "--no-start", *options]) == USER_ERROR
    error = capsys.readouterr().err
    assert "NODE_DOWN: no node runs on" in error
    assert log.read_bytes() == b"learned"
    assert not journal_path(config.parent / "node").exists()


@pytest.fixture
def begun(config: Path) -> Path:
    """Output folder of a run interrupted after four steps, the last of which was saved."""
    output_dir = config.parent / "run"
    (output_dir / "checkpoints" / "version-000004").mkdir(parents=True)
    write_head(output_dir, RunHead("id", 0, recipe(load_config(config))))
    metrics = MetricsFile(output_dir)
    for number in range(4):
        metrics.report(Step(number, policy_version=number, mean_reward=0.5, num_policy_steps=1))
    position = {"seed": 0, "epoch": 0, "next": 0, "num_rows": 1}
    write_loop_state(output_dir / "checkpoints" / "version-000004", LoopState(metrics.steps[-1], position))
    return output_dir


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1", "INVALID_ARGUMENT: seed: is 1, but the run was started with 0; restore it to resume"),
        ("train.num_steps=3", "train.num_steps: makes 3 steps, but the run has done 4"),
    ],
)
def test_a_key_that_a_run_cannot_be_resumed_with_is_named(
    config: Path, begun: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str
):
    before = (begun / "metrics.jsonl").read_bytes()
    assert problem in _error(config, capsys, override, options=["--resume"])
    assert (begun / "metrics.jsonl").read_bytes() == before


def test_chat_templates_of_a_resumed_run_read_the_time_of_its_begin(
    config: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(model, tmp_path / "dated")
    year = "{% if strftime_now('%Y') != '2024' %}{{ raise_exception('in ' ~ strftime_now('%Y')) }}{% endif %}"
    (tmp_path / "dated" / "chat_template.jinja").write_text(year + "{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "abc"}]}\n')
    dated = f'model.path="{tmp_path / "dated"}"'
    assert "the model's chat template refuses them: in 20" in _error(config, capsys, dated)
    now = recipe(load_config(config, overrides=[dated]))
    (tmp_path / "run").mkdir()
    write_head(tmp_path / "run", RunHead("id", 0, now, local_time="2024-12-31T23:59:59"))
    assert main(["train", str(config), "--set", dated, "--resume", "--no-start"]) == USER_ERROR
    assert "NODE_DOWN" in capsys.readouterr().err


def test_a_run_that_has_ended_is_left_as_it_is(config: Path, begun: Path, capsys: pytest.CaptureFixture[str]):
    MetricsFile(begun, read_steps(begun)).report(Step(4, policy_version=4))
    for name in ("summary.json", "model"):
        (begun / name).write_text("")
    assert main(["train", str(config), "--resume", "--set", "train.num_steps=4"]) == 0
    assert "has finished; to continue, raise train.num_steps" in capsys.readouterr().out
    assert not (config.parent / "node").exists()


def test_a_file_without_a_train_table_cannot_be_trained(config: Path, capsys: pytest.CaptureFixture[str]):
    config.write_text(config.read_text().partition("[train]")[0])
    assert "neither a [train] nor an [sft] table" in _error(config, capsys)
    assert main(["eval", str(config)]) == USER_ERROR
    assert "tasuki: error INVALID_ARGUMENT: train: is missing" in capsys.readouterr().err


# --- the table [sft]

TRAIN = '[train]\ndataset = "train.jsonl"\noutput_dir = "run"\nmax_new_tokens = 32\n[train.reward]\nfunction = "rewards:one"\n'


@pytest.fixture
def sft_config(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "abc", "completion": "cba"}\n' * 5)
    path = tmp_path / "node.toml"
    path.write_text(
        f'state_dir = "node"\n[model]\npath = {json.dumps(str(model))}\n[trainer]\nmicro_batch_tokens = 64\n[rollout]\n'
        'context_length = 8\n[sft]\ndataset = "train.jsonl"\noutput_dir = "run"\nsamples_per_step = 2\n'
    )
    return path


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_a_bad_supervised_line_is_named(sft_config: Path, capsys: pytest.CaptureFixture[str], key: str):
    good, bad = sft_config.parent / "train.jsonl", sft_config.parent / "bad.jsonl"
    bad.write_text(good.read_text() + "{\n")
    files = {"dataset": good, "eval_dataset": good, key: bad}
    told = _error(sft_config, capsys, *(f'sft.{name}="{file}"' for name, file in files.items()))
    assert f"INVALID_ARGUMENT: sft.{key}: " in told and "bad.jsonl:6" in told


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
def test_a_bad_key_of_sft_is_named(sft_config: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str):
    assert problem in _error(sft_config, capsys, *overrides)


def test_a_file_with_both_tables_names_both(sft_config: Path, capsys: pytest.CaptureFixture[str]):
    sft_config.write_text(sft_config.read_text() + TRAIN)
    assert "sft is in one file with [train]; put them into two files" in _error(sft_config, capsys)


@pytest.mark.parametrize(
    ("override", "num_steps", "key"),
    [(None, 3, "sft.num_epochs"), ("sft.num_epochs=4", 10, "sft.num_epochs"), ("sft.num_steps=4", 4, "sft.num_steps")],
)
def test_the_length_is_in_steps_or_in_epochs(sft_config: Path, override: str | None, num_steps: int, key: str):
    loaded = load_config(sft_config, overrides=[] if override is None else [override])
    assert loaded.sft is not None
    settings = read_sft(loaded, loaded.sft).settings
    assert (settings.num_steps, settings.length_key) == (num_steps, key)
