"""Checkpoints that many nodes save together, on separate disks or in one folder, and the prefix of their logs that they keep."""

from pathlib import Path

import pytest

from tasuki.trainer.durable.restore import agree, outline_of
from tasuki.trainer.durable.saves import (
    FACTS_FILE,
    can_be_published,
    check_save_id,
    clear_other_saves,
    delete,
    partial_path,
    publish,
    saved_as,
    written_path,
)
from tasuki.v1.ranks_pb2 import LogOutline, TrainingRecord
from tasuki.v1.types_pb2 import ROLE_CRITIC, ROLE_POLICY
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


@pytest.mark.parametrize(
    ("text", "save_id"), [('{"save_id": "a"}', "a"), ('{"roles": {}}', None), ('["a"]', None), ("{", None)]
)
def test_a_checkpoint_names_the_save_that_wrote_it(tmp_path: Path, text: str, save_id: str | None) -> None:
    assert saved_as(tmp_path) is None
    (tmp_path / FACTS_FILE).write_text(text)
    assert saved_as(tmp_path) == save_id


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


def record(kind: str, request_id: str, *, save_id: str = "") -> TrainingRecord:
    made = TrainingRecord(request_id=request_id, save_id=save_id)
    getattr(made, kind).SetInParent()
    return made


def outline(*commands: str, save_id: str = "", written: str = "") -> LogOutline:
    """commands: such as "f1" for forward_backward, "o2" for optim_step, capitals for the critic. save_id: of the checkpoint below."""
    kinds = {"f": "forward_backward", "o": "optim_step"}
    records = [record("checkpoint", f"by-{save_id}", save_id=save_id)] if save_id else []
    for name in commands:
        records.append(made := record(kind := kinds[name[0].lower()], name[1:]))
        getattr(made, kind).role = ROLE_CRITIC if name[0].isupper() else ROLE_POLICY
    return outline_of(records, written_save_id=written)


def kept(*outlines: LogOutline) -> list[tuple[bool, int]]:
    agreed = [agree(outlines, node_rank=rank) for rank in range(len(outlines))]
    return [(each.publishes_written, each.num_commands) for each in agreed]


def test_equal_logs_are_kept_whole() -> None:
    assert kept(outline("f1", "o2"), outline("f1", "o2")) == [(False, 2)] * 2
    assert kept(outline(), outline()) == [(False, 0)] * 2


def test_a_command_that_one_node_lacks_is_forgotten_on_all() -> None:
    assert kept(outline("f1", "o2"), outline("f1"), outline("f1", "o2", "f3")) == [(False, 1)] * 3
    assert kept(outline("f1", "o2"), outline("f1", "o9")) == [(False, 1)] * 2


def test_a_node_that_had_written_publishes_as_the_others_have() -> None:
    published = outline("f3", save_id="b")
    behind = outline("f1", "o2", "f3", save_id="a", written="b")
    # The node that is behind keeps only the checkpoint and its pending gradients.
    assert kept(published, behind, behind) == [(False, 2), (True, 2), (True, 2)]
    published = outline("f1", save_id="b")
    behind = outline("f1", "F2", "O3", save_id="a", written="b")
    assert kept(published, behind) == [(False, 2), (True, 2)]


def test_a_save_that_no_node_has_published_is_not_taken() -> None:
    written = outline("f1", "o2", save_id="a", written="b")
    assert kept(written, written) == [(False, 3)] * 2


def test_logs_of_different_checkpoints_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="nodes 0 and 1 build on different checkpoints"):
        agree([outline("f1", save_id="a"), outline("f1")], node_rank=0)
    with pytest.raises(InvalidArgument, match="nodes 1 and 0"):
        agree([outline(save_id="b"), outline(save_id="a", written="c")], node_rank=1)
