"""`tasuki train` on a running node: settings in its file must match the node's, and missing ones are taken from the node."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.config.load import load_config, save_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import config_path
from tasuki.node.node_settings import adopt_node
from tasuki.node.start import running_node
from tasuki.runs.recipe import recipe
from tasuki.wire.errors import InvalidArgument
from tests.unit.test_plan_cli import CONFIG

HEAD = 'state_dir = "state"\n[model]\npath = "model"\n'
RUN = '[train]\ndataset = "rows.jsonl"\noutput_dir = "run"\n[train.reward]\nfunction = "a:b"\n'
NODE = (
    HEAD
    + "[trainer]\nlearning_rate = 1.5e-3\nbetas = [0.9, 0.95]\n[trainer.critic]\nlearning_rate = 1e-5\n"
    + "[trainer.lora]\nrank = 8\n[rollout]\ncontext_length = 64\n[memory]\nhost_budget_bytes = '8GB'\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder of a node that runs with NODE for the length of the test."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file({}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "node.toml").write_text(NODE)
    (tmp_path / "train.toml").write_text(HEAD + RUN)
    config = load_config(tmp_path / "node.toml")
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        save_config(config, config_path(config.state_dir))
        yield tmp_path


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "trainer.learning_rate=0.1",
            "is 0.1 here and 0.0015 on the node that is running; stop it first with: tasuki down --state-dir",
        ),
        ("trainer.betas=[0.9, 0.9]", "is (0.9, 0.9) here and (0.9, 0.95) on the node"),
        ("trainer.critic.learning_rate=1e-4", "is 0.0001 here and 1e-05 on the node"),
        ("trainer.lora.rank=4", "is 4 here and 8 on the node"),
        ("trainer.critic.lora_rank=4", "is 4 here and not set on the node"),
        ("rollout.context_length=32", "is 32 here and 64 on the node"),
        ("memory.host_budget_bytes=9GB", "is 9000000000 here and 8000000000 on the node"),
        ("model.path=/elsewhere", "is /elsewhere here and {model} on the node"),
        ("device=cuda", "is 'cuda' here and 'cpu' on the node"),
    ],
)
def test_a_key_that_the_node_runs_without_is_named_with_both_values(folder: Path, override: str, problem: str) -> None:
    run = ["train.algorithm=ppo"] if "critic" in override else []
    config = load_config(folder / "train.toml", overrides=[*run, override])
    with pytest.raises(InvalidArgument) as refused:
        adopt_node(config)
    field = override.partition("=")[0]
    assert refused.value.metadata["field"] == field
    assert problem.format(model=folder / "model") in refused.value.message


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_the_command_refuses_it_before_it_reads_or_writes_anything(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    arguments = ["train", str(folder / "train.toml"), "--no-start", *options, "--set", "trainer.learning_rate=0.1"]
    assert main(arguments) == USER_ERROR
    assert "INVALID_ARGUMENT: trainer.learning_rate: is 0.1 here and 0.0015 on the node" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_what_a_file_leaves_out_is_the_nodes_and_is_recorded_so(folder: Path) -> None:
    config = adopt_node(load_config(folder / "train.toml", overrides=["trainer.lora.rank=8", "train.temperature=0.5"]))
    assert (config.trainer.learning_rate, config.rollout.context_length) == (1.5e-3, 64)
    assert config.train is not None and config.train.temperature == 0.5
    assert recipe(config)["trainer.learning_rate"] == 1.5e-3


def test_a_node_that_came_up_meanwhile_must_have_every_setting(folder: Path) -> None:
    config = load_config(folder / "train.toml")
    with (
        pytest.raises(InvalidArgument, match=r"trainer\.learning_rate: is 1e-06 here and 0\.0015 on the node"),
        running_node(config),
    ):
        pass


def test_without_a_node_the_file_counts(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(HEAD + RUN)
    config = load_config(tmp_path / "train.toml")
    (tmp_path / "state").mkdir()
    save_config(load_config(tmp_path / "train.toml", overrides=["seed=9"]), config_path(config.state_dir))
    assert adopt_node(config) is config
