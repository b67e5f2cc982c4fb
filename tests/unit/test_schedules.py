"""A run whose learning-rate schedule would end before the run is refused at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.runs.settings import RunSettings, check_schedules
from tasuki.wire.errors import InvalidArgument

CRITIC = ["train.algorithm=ppo", "trainer.critic.learning_rate=1e-3"]
LINEAR, CRITIC_LINEAR = ["trainer.lr_schedule=linear"], [*CRITIC, "trainer.critic.lr_schedule=cosine"]


def check(folder: Path, overrides: list[str], *, num_steps: int) -> None:
    (folder / "node.toml").write_text(
        'state_dir = "node"\n[model]\npath = "model"\n'
        '[train]\ndataset = "train.jsonl"\noutput_dir = "run"\n[train.reward]\nfunction = "a:b"\n'
    )
    config = load_config(folder / "node.toml", overrides=overrides)
    run = RunSettings(
        table="train",
        output_dir=folder / "run",
        num_steps=num_steps,
        length_key="train.num_steps",
        rows_per_step=1,
        save_every=None,
    )
    check_schedules(config, run)


@pytest.mark.parametrize(
    ("overrides", "field", "least"),
    [
        ([*LINEAR, "trainer.total_steps=4"], "trainer.total_steps", 6),
        ([*CRITIC_LINEAR, "trainer.critic.total_steps=5"], "trainer.critic.total_steps", 6),
        ([*CRITIC, *LINEAR, "trainer.total_steps=3", "train.critic_warmup_steps=2"], "trainer.total_steps", 4),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_named_with_what_it_needs(
    tmp_path: Path, overrides: list[str], field: str, least: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"raise it to {least}, or lower train.num_steps") as refused:
        check(tmp_path, overrides, num_steps=6)
    assert refused.value.metadata["field"] == field
