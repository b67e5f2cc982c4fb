"""The sample dump as the dashboard reads it, and the texts of tokens."""

import json
import os
from base64 import b64encode
from pathlib import Path

import pytest

from tasuki.dashboard.samples import TokenTexts, compare, list_steps, read_picture, read_sample, read_step
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


def test_tokens_that_the_policy_did_not_draw_have_no_log_probs(tmp_path: Path) -> None:
    episode = {
        "token_ids": [5, 6, 7],
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-1, 0, -2],
        "trainer_log_probs": [-1, -9, -2],
    }
    (tmp_path / "step-000001.jsonl").write_text(json.dumps(episode) + "\n")
    sample = read_sample(tmp_path, 1, 0, token_text=TokenTexts(None))
    assert sample["is_masked"] == [False, True, False]
    assert sample["rollout_log_probs"] == sample["trainer_log_probs"] == [-1, None, -2]


def test_lines_that_are_no_sample_are_counted_and_shown_no_completion(tmp_path: Path) -> None:
    strange = {"prompt": [{"role": "user", "content": "hi"}], "completion": None, "reward": "high", "token_ids": ["x"]}
    lines = ["not json", "[]", "[" * 200_000, json.dumps(strange), json.dumps({**strange, "reward": None}), '{"torn": ']
    (tmp_path / "step-000007.jsonl").write_text("\n".join(lines))
    step = read_step(tmp_path, 7)
    assert (len(step["samples"]), len(step["rewards"]), step["num_bad_lines"]) == (1, 1, 4)
    assert step["samples"][0]["prompt"] == "user: hi"
    for index in (0, 4):
        with pytest.raises(InvalidArgument, match="is not a sample"):
            read_sample(tmp_path, 7, index, token_text=TokenTexts(None))


def written(folder: Path, step: int, *samples: dict) -> None:
    (folder / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def test_a_search_looks_at_whole_texts_and_every_reward_is_told(tmp_path: Path) -> None:
    long = {"group": 0, "prompt": "p" * 900 + " Needle", "completion": "", "reward": 1, "rewards": {"a": 2, "b": -1}}
    written(tmp_path, 0, long, {"group": 0, "prompt": "q", "completion": "needle", "reward": 0}, {"group": 1, "reward": None})
    for contains, found in (("", [0, 1]), ("NEEDLE", [0, 1]), ("q", [1]), ("nothing", [])):
        step = read_step(tmp_path, 0, contains=contains)
        assert [sample["index"] for sample in step["samples"]] == found
        assert step["rewards"] == [{"": 1.0, "a": 2.0, "b": -1.0}, {"": 0.0}, {"": None}]


def test_rows_that_changed_between_two_evaluations_come_first(tmp_path: Path) -> None:
    def row(group: int, reward: float | None, **texts: str) -> dict:
        return {"group": group, "reward": reward, "rewards": {"a": reward}, **texts}

    text = {"prompt": "p", "completion": "c"}
    written(tmp_path, 0, row(0, 1.0, **text), row(1, 0.0, **text), row(2, 1.0), row(3, 0.0), row(3, 1.0), row(4, -1.0))
    written(
        tmp_path, 5, row(0, 1.0, **text), row(1, 1.0, **text), row(2, 0.5), row(3, 0.5), row(3, 0.5), row(4, None), row(9, 1.0)
    )
    found = compare(tmp_path, 0, 5)
    assert (found["counts"], found["num_rows"], found["is_cut"]) == ({"better": 1, "worse": 1, "same": 3}, 6, False)
    assert [(one["row"], one["change"]) for one in found["rows"]] == [(1, 1.0), (2, -0.5), (0, 0.0)]
    assert found["rows"][0]["was"] == {
        "prompt": "p",
        "completion": "c",
        "finish_reason": "",
        "rewards": {"a": 0.0},
        "reward": 0.0,
    }


def test_a_character_of_several_tokens_is_whole_in_a_joined_text(tmp_path: Path) -> None:
    vocab = {"Ã": 0, "©": 1, "Ġhi": 2}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 3, "content": "<é>"}], "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert TokenTexts(tmp_path).joined([3, 0, 1, 2, 9]) == "<é>é hi⟨9⟩"
    assert TokenTexts(None).joined([1]) == "⟨1⟩"


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


def test_images_of_a_prompt_are_served_and_other_files_are_not(tmp_path: Path) -> None:
    png, jpeg = b"\x89PNG\r\n\x1a\n1", b"\xff\xd8\xff2"
    (tmp_path / "a.png").write_bytes(png)
    (tmp_path / "secret").write_text("not an image")
    sources = [{"path": str(tmp_path / "a.png")}, {"bytes": b64encode(jpeg).decode()}, {"path": str(tmp_path / "secret")}]
    parts = [{"type": "image", **source} for source in (*sources, {"path": str(tmp_path / "gone")}, {"path": "/dev/zero"})]
    prompt = [
        {"role": "user", "content": [*parts[:2], {"type": "text", "text": "Which?"}]},
        {"role": "user", "content": parts[2:]},
    ]
    written(tmp_path, 3, {"prompt": prompt, "completion": "c", "token_ids": []})
    sample = read_sample(tmp_path, 3, 0, token_text=TokenTexts(None))
    assert (sample["num_images"], sample["messages"][0]["content"]) == (5, "[image]\n[image]\nWhich?")
    assert [read_picture(tmp_path, 3, 0, place) for place in (0, 1)] == [("image/png", png), ("image/jpeg", jpeg)]
    for place in (2, 3, 4, 5):
        with pytest.raises(InvalidArgument):
            read_picture(tmp_path, 3, 0, place)
