"""Prefix of their training logs that the nodes of a fleet keep after a restart."""

import pytest

from tasuki.trainer.durable.restore import agree, outline_of
from tasuki.v1.ranks_pb2 import LogOutline, TrainingRecord
from tasuki.v1.types_pb2 import ROLE_CRITIC, ROLE_POLICY
from tasuki.wire.errors import InvalidArgument


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
