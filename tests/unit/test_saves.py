"""Checkpoints that many nodes save together, on separate disks or in one folder."""

from pathlib import Path

import pytest

from tasuki.trainer.durable.saves import (
    FACTS_FILE,
    can_be_published,
    check_save_id,
    clear_other_saves,
    delete,
    partial_path,
    publish,
    written_path,
)
from tasuki.wire.errors import InvalidArgument, PathExists, PathNotFound


def write(path: Path, save_id: str) -> None:
    folder = written_path(path, save_id)
    folder.mkdir(parents=True)
    (folder / FACTS_FILE).write_text(f'{{"save_id": "{save_id}"}}')


def test_publishing_gives_the_name_once_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write(path, "a")
    assert can_be_published(path, "a")
    publish(path, "a")
    publish(path, "a")  # another node of the same folder
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]


def test_what_was_not_written_or_is_in_the_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    with pytest.raises(PathNotFound):
        publish(path, "a")
    write(path, "a")
    publish(path, "a")
    write(path, "b")
    with pytest.raises(PathExists):
        publish(path, "b")


def test_leftovers_of_other_saves_go_and_ours_stay(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write(path, "old")
    write(path, "mine")
    partial_path(path, "older").mkdir()
    write(tmp_path / "step-10", "old")
    clear_other_saves(path, "mine")
    assert {each.name for each in tmp_path.iterdir()} == {".step-1.written-mine", ".step-10.written-old"}
    delete(path, "mine")
    delete(path, "mine")
    assert not can_be_published(path, "mine")


@pytest.mark.parametrize("name", ["*", "**", "a**b", "[.]", "?"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    others = [written_path(tmp_path / "victim", "other"), partial_path(tmp_path / f"{name}.partial-x", "other")]
    for folder in (*others, partial_path(path, "old"), tmp_path / f".{name}.partial"):
        folder.mkdir()
    clear_other_saves(path, "mine")
    assert set(tmp_path.iterdir()) == set(others)


@pytest.mark.parametrize("save_id", ["", "../up", "a/b", "a" * 65, "ä"])
def test_a_save_id_cannot_leave_its_folder(save_id: str) -> None:
    with pytest.raises(InvalidArgument, match="save_id"):
        check_save_id(save_id)
