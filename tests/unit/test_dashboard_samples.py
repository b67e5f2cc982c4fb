"""The sample dump as the dashboard reads it, and the texts of tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasuki.dashboard.samples import TokenTexts, list_steps, read_sample, read_step
from tasuki.wire.errors import InvalidArgument, PathNotFound

RECORDED = Path(__file__).parents[1] / "recorded_run"


def test_a_recorded_step_has_its_groups_and_a_completion_by_token() -> None:
    folder = RECORDED / "samples"
    assert list_steps(folder) == [0, 2, 4, 8, 16, 29]
    step = read_step(folder, 29)
    assert (len(step["samples"]), step["num_bad_lines"]) == (16, 0)
    assert len({sample["group"] for sample in step["samples"]}) == 2
    sample = read_sample(folder, 29, 0, token_text=TokenTexts(RECORDED / "model"))
    assert "".join(sample["tokens"]) == f"{sample['completion']}<eos>"
    assert len(sample["token_ids"]) == len(sample["rollout_log_probs"]) == len(sample["trainer_log_probs"])


def test_lines_and_fields_of_the_wrong_kind_are_passed_over(tmp_path: Path) -> None:
    strange = {
        "group": "x", "sample": 10**30, "prompt": [{"role": "user", "content": "\ud800hi"}], "completion": None, "reward": "high",
        "rewards": [1], "advantage": 10**400, "token_ids": [1, "2", 3], "rollout_log_probs": [None, "x", -1], "fields": {"a": {"b": 1}},
    }  # fmt: skip
    lines = ["not json", "[]", "[" * 200_000, json.dumps(strange), '{"torn": ']
    (tmp_path / "step-000007.jsonl").write_text("\n".join(lines))
    step = read_step(tmp_path, 7)
    assert (len(step["samples"]), step["num_bad_lines"]) == (1, 3)
    assert json.dumps(step).encode()
    sample = read_sample(tmp_path, 7, 3, token_text=TokenTexts(None))
    assert (sample["group"], sample["sample"], sample["reward"], sample["advantage"], sample["rewards"]) == (
        None,
        None,
        None,
        None,
        {},
    )
    assert (sample["token_ids"], sample["tokens"], sample["rollout_log_probs"]) == ([1, 3], [None, None], [None, None])
    assert sample["prompt"] == '[{"role": "user", "content": "?hi"}]'
    with pytest.raises(InvalidArgument, match="is not a sample"):
        read_sample(tmp_path, 7, 0, token_text=TokenTexts(None))


def test_a_step_without_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-000001.jsonl")
    (tmp_path / "step-000002.jsonl").mkdir()
    (tmp_path / "step-x.jsonl").touch()
    assert list_steps(tmp_path) == [1, 2]
    for step in (1, 2):
        with pytest.raises(InvalidArgument, match="is not a regular file"):
            read_step(tmp_path, step)
    with pytest.raises(PathNotFound):
        read_step(tmp_path, 3)
    with pytest.raises(PathNotFound):
        read_step(None, 0)
    assert list_steps(tmp_path / "none") == list_steps(None) == []


@pytest.mark.parametrize(
    ("tokenizer", "texts"),
    [
        ({"model": {"vocab": {"Ġhi": 0, "Ċ": 1, "Ã": 2}}, "decoder": {"type": "ByteLevel"}}, [" hi", "\n", "\ufffd"]),
        ({"model": {"vocab": [["▁hi", -1.0], ["<0x0A>", -2.0], ["x", 0]]}, "decoder": {"decoders": []}}, [" hi", "\n", "x"]),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<Ġ>"}], "decoder": {"type": "ByteLevel"}},
         ["a", "<Ġ>", None]),
        ({"model": {"vocab": 7}}, [None, None, None]),
        ([], [None, None, None]),
        ({"model": {"vocab": {"a": float("inf")}}}, [None, None, None]),
    ],
)  # fmt: skip
def test_texts_of_tokens(tokenizer: object, texts: list[str | None], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    token_texts = TokenTexts(tmp_path)
    assert [token_texts(token_id) for token_id in range(3)] == texts
