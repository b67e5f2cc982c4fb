"""Problems and rewards of client/examples/arithmetic."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, ROOT

EXAMPLE = ROOT / "client" / "examples" / "arithmetic"


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE / name, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)


def make_task(folder: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return script("make_task.py", folder, *options)


def rows_of(path: Path) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"question": row["prompt"][0]["content"], "answer": row["answer"]} for row in rows]


def imported(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rewards() -> object:
    return imported("rewards")


def test_no_sum_is_held_out_and_trained_on_in_either_order(tmp_path: Path) -> None:
    assert make_task(tmp_path, "--seed", "3").returncode == 0

    def terms(name: str) -> list[tuple[str, str]]:
        rows = rows_of(tmp_path / name)
        words = [row["question"].removesuffix("? Write the equation.").split() for row in rows]
        assert all(int(word[2]) + int(word[4]) == int(row["answer"]) for word, row in zip(words, rows, strict=True))
        return [(word[2], word[4]) for word in words]

    held_out, trained = terms("eval.jsonl"), set(terms("train.jsonl"))
    assert len(held_out) == 256
    assert not trained & {*held_out, *((b, a) for a, b in held_out)}
    assert len(trained) + len({*held_out, *((b, a) for a, b in held_out)}) == 90 * 90


@pytest.mark.parametrize(
    ("completion", "exact", "form"),
    [
        ("12 + 34 = 46", 1, 1),
        (" 46 ", 1, 0),
        ("12 + 34 = 47", 0, 1),
        ("12 + 34 = 46.", 0, 0),
        ("46 = 12 + 34", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards_of_sums(rewards: object, completion: str, exact: float, form: float) -> None:
    assert (rewards.exact(completion=completion, answer="46"), rewards.form(completion=completion)) == (exact, form)
