"""docs/algorithms.md lists every algorithm with its preset, every loss, and every metric that a step of the loop reports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from tasuki.algorithms.estimator import AdvantageSettings, Estimator
from tasuki.algorithms.loss_types import Correction, Loss, LossConfig, ValueLoss
from tasuki.client.evaluation import EvalSettings
from tasuki.client.rl_loop import Settings
from tasuki.client.types import SamplingParams
from tasuki.config.algorithms import PRESETS
from tasuki.config.train_schema import TrainConfig
from tests.unit.loop_node import ROWS, LoopClient, by_number, loop_of, steps_of

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
ROWS_OF_PAGE = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def flat(table: Mapping[str, Any], *, below: str = "") -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in table.items():
        keys |= flat(value, below=f"{below}{key}.") if isinstance(value, Mapping) else {f"{below}{key}": value}
    return keys


def assignments(cell: str) -> dict[str, Any]:
    """Keys and values of the code in a cell, such as `loss.clip_low = 0.2`."""
    return flat(tomllib.loads("\n".join(code for code in re.findall(r"`([^`]+)`", cell) if " = " in code)))


def presets_of_page() -> dict[str, list[str]]:
    header = next(number for number, row in enumerate(ROWS_OF_PAGE) if row[0] == "`algorithm`")
    return {row[0].strip("`"): row for row in ROWS_OF_PAGE[header + 1 : header + 1 + len(PRESETS)]}


def test_the_page_has_the_algorithms_as_their_presets_are() -> None:
    found = {name: assignments(row[1]) for name, row in presets_of_page().items()}
    assert found == {name: flat(preset) for name, preset in PRESETS.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_what_the_page_adds_to_an_algorithm_are_keys_that_there_are(name: str) -> None:
    given = assignments(presets_of_page()[name][2])
    train: dict[str, Any] = {"dataset": "a", "output_dir": "b", "reward": {"function": "a:b"}, "algorithm": name}
    for key, value in given.items():
        *parents, last = key.split(".")
        table = train
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    expanded = flat(TrainConfig.model_validate(train).model_dump())
    assert {key: expanded[key] for key in given} == given


@pytest.mark.parametrize("loss", get_args(Loss))
def test_the_page_has_every_loss(loss: type) -> None:
    assert any(row[0] == f"`{loss.__name__}`" for row in ROWS_OF_PAGE)


def test_the_page_has_every_metric_of_a_step(tmp_path: Path) -> None:
    settings = Settings(
        num_steps=1,
        prompts_per_step=3,
        group_size=4,
        sampling=SamplingParams(max_new_tokens=8),
        output_dir=tmp_path,
        advantages=AdvantageSettings(estimator=Estimator.GAE, kl_coef=0.1),
        value_loss=LossConfig(loss=ValueLoss(), correction=Correction(token_truncation=None)),
        max_batches=2,
        evaluation=EvalSettings(num_samples=2, temperature=0.5, pass_at=(1,)),
    )
    loop = loop_of(LoopClient(), settings, reward={"exact": by_number, "short": by_number}, eval_rows=ROWS[:2])
    (step,) = steps_of(loop)
    named = {name for row in ROWS_OF_PAGE for name in re.findall(r"`([^`]+)`", row[0])}
    reported = {re.sub(r"/.*", "/<name>", name) for name in step.metrics if not name.startswith("size")}
    assert {"reward_kl", "critic/<name>", "reward/<name>", "num_generated_groups", "explained_variance"} <= reported
    assert reported - named == set()
