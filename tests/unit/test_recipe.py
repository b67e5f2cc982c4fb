"""A run resumes only if everything that its numbers depend on is unchanged."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasuki.cli.__main__ import main
from tasuki.config.load import load_config, save_config
from tasuki.config.paths import RUN_CONFIG
from tasuki.config.schema import NodeConfig
from tasuki.runs.earlier_run import RunHead, provenance, write_head
from tasuki.runs.recipe import check_recipe, recipe
from tasuki.trainer.durable.saves import FACTS_FILE
from tasuki.wire.errors import InvalidArgument
from tests.refusal import refusing
from tests.unit.test_plan_cli import CONFIG

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    unread = {"m.rotary_emb.inv_freq": np.zeros(3), "lm_head.weight": np.zeros(2), "value_head.weight": np.zeros(2)}
    save_file({NORM: np.zeros(2), **unread}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "node.toml").write_text(
        'state_dir = "node"\n[model]\npath = "model"\n[train]\ndataset = "train.jsonl"\noutput_dir = "run"\n'
        '[train.reward]\nfunction = "a:b"\n'
    )
    return tmp_path


def _config(folder: Path, *overrides: str) -> NodeConfig:
    return load_config(folder / "node.toml", overrides=overrides)


def test_provenance_names_the_commit_and_whether_it_was_changed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
    assert "commit" not in provenance(_config(folder), config_dir=folder)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "node.toml"), (*author, "commit", "-qm", "c")):
        subprocess.run(["git", *command], check=True)
    clean = provenance(_config(folder), config_dir=folder)
    assert len(clean["commit"]) == 40 and clean["dataset"] == str(folder / "train.jsonl")
    with (folder / "node.toml").open("a") as config:
        config.write("\n")
    assert provenance(_config(folder), config_dir=folder)["commit"] == f"{clean['commit']} with uncommitted changes"


@pytest.mark.parametrize(
    "override",
    [
        "train.prompts_per_step=3", "train.group_size=3", "train.temperature=0.5", "train.loss.kl_coef=0.1",
        "train.advantages.kl_coef=0.1", "train.loss.correction.token_truncation=3.0",
        'train.reward.function="a:c"', "trainer.learning_rate=0.1", "seed=1", "trainer.lora.rank=4",
    ],
)  # fmt: skip
def test_a_key_that_changes_the_numbers_is_named(folder: Path, override: str):
    begun_with = json.loads(json.dumps(recipe(_config(folder))))
    key = "trainer.lora" if "lora" in override else override.partition("=")[0]
    with refusing(key, match="but the run was started with"):
        check_recipe(recipe(_config(folder, override)), begun_with=begun_with, output_dir=folder / "run")


def test_adapters_may_be_named_in_the_words_of_another_backend(folder: Path):
    megatron = {"target_modules": ["linear_qkv", "linear_fc1"], "exclude_modules": ["0.mlp.linear_fc1"]}
    fsdp = {
        "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        "exclude_modules": ["0.mlp.gate_proj", "0.mlp.up_proj"],
    }
    given = _config(folder).model_dump(exclude_unset=True)
    first, then = (
        NodeConfig.model_validate(given | {"trainer": {"backend": backend, "lora": lora}})
        for backend, lora in (("megatron", megatron), ("fsdp", fsdp))
    )
    check_recipe(recipe(then), begun_with=recipe(first), output_dir=folder / "run")


def test_length_frequency_and_machine_may_change_and_folders_may_move(folder: Path):
    (folder / "held-out.jsonl").write_text('{"prompt": "b"}\n')
    linear = ("trainer.lr_schedule=linear", f'train.eval_dataset="{folder}/held-out.jsonl"')
    begun_with = recipe(_config(folder, *linear))
    (folder / "train.jsonl").rename(folder / "moved.jsonl")
    (folder / "model").rename(folder / "other")
    now = _config(
        folder, *linear, "train.num_steps=300", "train.save_every=7",
        "train.eval_every=9", "trainer.num_ranks=4", "train.reward.timeout_s=3", f'train.dataset="{folder}/moved.jsonl"',
        f'model.path="{folder}/other"', 'train.output_dir="elsewhere"', "rollout.max_running_requests=4",
    )  # fmt: skip
    check_recipe(recipe(now), begun_with=begun_with, output_dir=folder / "run")


def test_tensors_may_move_between_files_and_unread_ones_go_but_none_change_nor_may_the_texts(folder: Path):
    model, output_dir = folder / "model", folder / "run"
    begun_with = recipe(_config(folder))
    (model / "model.safetensors").unlink()
    save_file({NORM: np.zeros(2)}, model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {NORM: "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    check_recipe(recipe(_config(folder)), begun_with=begun_with, output_dir=output_dir)
    for changed, change in {
        "tensors": lambda: save_file({NORM: np.zeros(3)}, model / "model-00001-of-00001.safetensors"),
        "chat_template.jinja": lambda: (
            save_file({NORM: np.zeros(2)}, model / "model-00001-of-00001.safetensors"),
            (model / "chat_template.jinja").write_text("x"),
        ),
        "vocab.txt": lambda: (
            (model / "chat_template.jinja").write_text("{{ messages }}"),
            (model / "vocab.txt").write_text("x"),
        ),
    }.items():
        change()
        with refusing(f"model.path.{changed}", match="has changed since the run was started"):
            check_recipe(recipe(_config(folder)), begun_with=begun_with, output_dir=output_dir)


def test_the_head_of_a_critic_without_its_own_folder_counts(folder: Path):
    ppo = ("train.algorithm=ppo", "trainer.critic.learning_rate=0.1")
    begun_with = recipe(_config(folder, *ppo))
    save_file({NORM: np.zeros(2)}, folder / "model" / "model.safetensors")
    with pytest.raises(InvalidArgument, match="model.path.tensors: has changed since the run was started"):
        check_recipe(recipe(_config(folder, *ppo)), begun_with=begun_with, output_dir=folder / "run")


def test_a_checkpoint_is_exported_with_the_texts_that_its_run_began_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output_dir = _config(folder), folder / "run"
    output_dir.mkdir()
    write_head(output_dir, RunHead("a", 0, recipe(config)))
    save_config(config, output_dir / RUN_CONFIG)
    checkpoint = output_dir / "checkpoints" / "version-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / FACTS_FILE).write_text("{}")
    command = ["export", str(checkpoint)]
    (folder / "model" / "chat_template.jinja").write_text("x")
    assert main(command) == 2
    assert "model.path.chat_template.jinja: has changed since the run was started" in capsys.readouterr().err
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert main(command) == 2  # its facts are missing
    assert "has changed" not in capsys.readouterr().err
