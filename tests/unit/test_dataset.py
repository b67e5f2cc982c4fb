"""JSONL prompts: errors of bad lines, and an order that can be saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.wire.errors import InvalidArgument


def _written(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text)
    return path


def test_an_escaped_pair_is_one_character(tmp_path: Path):
    assert read_jsonl(_written(tmp_path, r'{"prompt": "\ud83d\ude00"}')) == [{"prompt": "\U0001f600"}]


def test_rows_keep_their_other_fields_and_empty_lines_are_passed_over(tmp_path: Path):
    chat = '{"prompt": [{"role": "user", "content": "hi"}]}'
    rows = read_jsonl(_written(tmp_path, f'{{"prompt": "1+1=", "answer": "2"}}\n\n{chat}\n'))
    assert rows == [{"prompt": "1+1=", "answer": "2"}, {"prompt": [{"role": "user", "content": "hi"}]}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{prompt: 1}", "not JSON"),
        ("[1, 2]", "expected an object, got list"),
        ('{"question": "1+1="}', "lacks `prompt`"),
        ('{"prompt": 7}', "must be a string or a list of chat messages, is int"),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt": []}', "has no messages"),
        ('{"prompt": [{"role": "user"}]}', "message 0"),
        ('{"prompt": "a", "completion": "b"}', "`completion`"),
        (r'{"prompt": "a\uD83d"}', "surrogates not allowed"),
        ('{"prompt": "a", "num_tokens": 3}', "`num_tokens` is reserved for the reward function; rename it"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, problem: str):
    path = _written(tmp_path, f'{{"prompt": "ok"}}\n{line}\n')
    with pytest.raises(InvalidArgument) as raised:
        read_jsonl(path)
    assert f"{path}:2" in raised.value.message
    assert problem in raised.value.message


def test_an_epoch_has_every_row_once_and_the_next_another_order():
    dataset = Dataset([{"prompt": str(number)} for number in range(50)], seed=3)
    first, second = dataset.next_rows(50), dataset.next_rows(50)
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert first != second
    assert first == Dataset([{"prompt": str(number)} for number in range(50)], seed=3).next_rows(50)
    assert first != Dataset([{"prompt": str(number)} for number in range(50)], seed=4).next_rows(50)


def test_a_request_across_the_end_of_an_epoch_is_whole():
    dataset = Dataset([{"prompt": str(number)} for number in range(3)], seed=0)
    assert len(dataset.next_rows(8)) == 8


def test_seek_goes_on_where_position_was_taken():
    rows = [{"prompt": str(number)} for number in range(10)]
    dataset = Dataset(rows, seed=5)
    dataset.next_rows(13)
    position = dataset.position()
    expected = dataset.next_rows(20)
    other = Dataset(rows, seed=5)
    other.seek(position)
    assert other.next_rows(20) == expected


def test_seek_refuses_a_position_of_other_rows_or_another_seed():
    rows = [{"prompt": str(number)} for number in range(10)]
    position = Dataset(rows, seed=5).position()
    with pytest.raises(InvalidArgument, match=r"position\.seed"):
        Dataset(rows, seed=6).seek(position)
    with pytest.raises(InvalidArgument, match=r"position\.num_rows"):
        Dataset(rows[:9], seed=5).seek(position)
