"""A preset prints as the settings that it sets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.algorithms import PRESETS
from tasuki.config.train_schema import TrainConfig
from tasuki.runs.expansion import expansion

REQUIRED: dict[str, Any] = {"dataset": "rows.jsonl", "output_dir": "run", "reward": {"function": "a:b"}}
OTHERWISE: dict[str, Any] = {
    "seed": 3,
    "eval_dataset": Path("/data/held-out.jsonl"),
    "top_k": 5,
    "advantages": {"kl_coef": 0.1},
    "loss": {"kl_coef": 0.2, "correction": {"token_mask": [0.5, 2.0]}},
    "eval": {"num_samples": 2, "temperature": 1.0},
}


def test_a_preset_is_told_with_every_key_that_it_sets() -> None:
    assert expansion(TrainConfig(**REQUIRED, algorithm="dapo")).splitlines() == [
        "[train]",
        'algorithm = "dapo"',
        "max_batches = 4",
        "[train.advantages]",
        'estimator = "group_mean"',
        'std = "sample"',
        "[train.loss]",
        'name = "ppo"',
        "clip_low = 0.2",
        "clip_high = 0.28",
    ]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("own", [{}, OTHERWISE, {"loss": {"name": "cispo"}}], ids=["preset", "own", "loss"])
def test_what_is_told_says_the_whole_table_again(name: str, own: dict[str, Any]) -> None:
    train = TrainConfig(**REQUIRED, algorithm=name, **own)
    told = tomllib.loads(expansion(train))["train"]
    assert TrainConfig(**REQUIRED, **told) == train
    assert own.get("seed") == told.get("seed")
