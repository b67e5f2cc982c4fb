"""From a configuration to the loop of `tasuki train`, for both tables, on a client in memory."""

import json
from pathlib import Path
from typing import cast

import pytest

from tasuki.cli.train import read_training
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.load import load_config
from tasuki.runs.resume import Continuation
from tests.models import make_model, save_checkpoint
from tests.unit.loop_node import LoopClient
from tests.unit.test_sft_loop import SftClient

TABLES = {
    "train": 'num_steps = 2\nprompts_per_step = 2\ngroup_size = 3\nmax_new_tokens = 4\n[train.reward]\nfunction = "last:last"\n',
    "sft": "num_steps = 2\nsamples_per_step = 2\n",
}
ROWS = {"train": {"prompt": "ab"}, "sft": {"prompt": "ab", "completion": "ba"}}
REWARD = "def last(completion_token_ids, **fields):\n    return float(completion_token_ids[-1])\n"


@pytest.mark.parametrize("table", ["train", "sft"])
def test_a_table_is_trained_by_its_loop_and_told_by_its_figures(tmp_path: Path, table: str) -> None:
    model = save_checkpoint(make_model("qwen2", seed=0), tmp_path / "model")
    (tmp_path / "last.py").write_text(REWARD)
    (tmp_path / "run").mkdir()
    (tmp_path / "rows.jsonl").write_text((json.dumps(ROWS[table]) + "\n") * 3)
    (tmp_path / "node.toml").write_text(
        f'state_dir = "node"\n[model]\npath = "{model}"\n[{table}]\ndataset = "rows.jsonl"\noutput_dir = "run"\n{TABLES[table]}'
    )
    training = read_training(load_config(tmp_path / "node.toml"))
    assert (training.settings.table, training.settings.length_key) == (table, f"{table}.num_steps")
    assert training.settings.num_steps == 2
    client = LoopClient() if table == "train" else SftClient()
    steps: list[Step] = []
    progress = Progress(num_steps=2, eval_every=training.eval_every)
    with training.opened((tmp_path,), save_now=lambda: False, progress=progress) as make_loop:
        make_loop(cast(Client, client), training.dataset(), Continuation()).run(steps.append)
    assert [(step.step, step.policy_version) for step in steps] == [(0, 0), (1, 1), (2, 2)]
    assert client.verbs()[-1] == "export_model"
    assert (progress.record().activity, progress.record().step) == ("export", 2)
    training.draw(training.settings.output_dir, steps)
    assert (tmp_path / "run" / "curve.png").exists()
    summary = training.summarize(steps, seed=training.seed, seconds=1.0, changeovers=3, policy_version=2)
    assert (summary["steps"], summary["changeovers"], summary["policy_version"]) == (2, 3, 2)
    assert summary["mean_reward_last" if table == "train" else "loss_last"] == (1.0 if table == "train" else 1.5)
