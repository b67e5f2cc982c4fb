"""A run's files: data, checkpoints of the loop."""

import errno
import os
from pathlib import Path

import pytest

from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.durable import named_if_full
from tasuki.client.loop_state import (
    LOOP_FILE,
    LoopState,
    checkpoint_path,
    damaged_checkpoint,
    newest_checkpoint,
    read_loop_state,
    write_loop_state,
)
from tasuki.client.step import Step
from tasuki.wire.errors import DiskFull, InvalidArgument


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
        ('{"prompt": "a", "answer": NaN}', "NaN is no JSON number"),
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
    rows = [{"prompt": str(number)} for number in range(50)]
    dataset = Dataset(rows, seed=3)
    first, second = dataset.next_rows(50), dataset.next_rows(50)
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert first != second
    assert first == Dataset(rows, seed=3).next_rows(50) != Dataset(rows, seed=4).next_rows(50)
    assert len(Dataset(rows[:3], seed=0).next_rows(8)) == 8, "across the end of an epoch"


def test_seek_goes_on_where_position_was_taken_of_the_same_rows_and_seed():
    rows = [{"prompt": str(number)} for number in range(10)]
    dataset, other = Dataset(rows, seed=5), Dataset(rows, seed=5)
    dataset.next_rows(13)
    position = dataset.position()
    other.seek(position)
    assert other.next_rows(20) == dataset.next_rows(20)
    for field, wrong in (("seed", Dataset(rows, seed=6)), ("num_rows", Dataset(rows[:9], seed=5))):
        with pytest.raises(InvalidArgument, match=rf"position\.{field}"):
            wrong.seek(position)


POSITION = {"seed": 0, "epoch": 1, "next": 3, "num_rows": 10}


def checkpoint(folder: Path, number: int) -> Path:
    path = folder / f"version-{number + 1:06d}"
    path.mkdir()
    write_loop_state(path, LoopState(Step(number, policy_version=number, seconds={"generate": 0.5}), POSITION))
    return path


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path):
    path = checkpoint(tmp_path, 3)
    assert read_loop_state(path) == LoopState(Step(3, policy_version=3, seconds={"generate": 0.5}), POSITION)
    assert [file.name for file in path.iterdir()] == [LOOP_FILE]


def test_the_newest_is_that_of_the_latest_step_and_one_without_its_file_is_passed_over(tmp_path: Path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert newest_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 999_998)
    latest = checkpoint(tmp_path, 1_000_008)  # with a longer name
    (tmp_path / "version-1000020").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], found[1].step.step) == (latest, 1_000_008)


def test_a_checkpoint_is_named_by_its_version_and_by_its_step_where_that_one_is_taken(tmp_path: Path):
    warm_up = Step(9, policy_version=4, num_critic_steps=1)
    assert checkpoint_path(tmp_path, warm_up) == tmp_path / "version-000004"
    (tmp_path / "version-000004").mkdir()
    assert checkpoint_path(tmp_path, warm_up) == tmp_path / "version-000004", "whoever saved it died before it was complete"
    (tmp_path / "version-000004" / "loop.json").touch()
    assert checkpoint_path(tmp_path, warm_up) == tmp_path / "version-000004-step-000009"
    assert checkpoint_path(tmp_path, Step(9, policy_version=4)) is None
    assert checkpoint_path(tmp_path, Step(9, policy_version=4, num_policy_steps=1)) == tmp_path / "version-000005"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"step": {}, "position": {}}', '{"step": {"step": 1}, "position": {"next": "x"}}', "\xff"]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str):
    path = checkpoint(tmp_path, 3)
    (path / LOOP_FILE).write_text(text)
    with pytest.raises(InvalidArgument, match=r"version-000004/loop\.json is damaged .*remove .*version-000004"):
        newest_checkpoint(tmp_path)


def test_no_flipped_bit_is_read(tmp_path: Path):
    path = checkpoint(tmp_path, 3) / LOOP_FILE
    good = path.read_bytes().rstrip()
    for place in range(len(good)):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"version-000004/loop\.json is damaged .*remove .*version-000004"):
            newest_checkpoint(tmp_path)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, OSError)])
def test_a_failed_write_names_its_file_and_only_a_full_disk_is_called_full(tmp_path: Path, number: int, kind: type[Exception]):
    with pytest.raises(kind, match="a.json"), named_if_full(tmp_path / "a.json"):
        raise OSError(number, os.strerror(number))


def test_a_damaged_checkpoint_is_named_with_the_complete_one_before_it(tmp_path: Path):
    oldest, newest = checkpoint(tmp_path, 999_997), checkpoint(tmp_path, 1_000_000)
    (tmp_path / "version-999999").mkdir()
    assert damaged_checkpoint(newest, "a byte is wrong").message == (
        f"checkpoint: a byte is wrong; remove {newest} to resume from {oldest}"
    )
    assert damaged_checkpoint(oldest, "a byte is wrong").message.endswith(
        "to restart the run at step 0: no complete checkpoint precedes it"
    )
