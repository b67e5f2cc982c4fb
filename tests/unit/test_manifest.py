"""Layout of an arena, and refusals of received manifests."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.v1.weights_pb2 import IpcMemory
from tasuki.weights.manifest import (
    Box,
    Entry,
    Manifest,
    check,
    check_complete,
    first_gap,
    first_overlap,
    from_proto,
    lay_out,
    to_proto,
)
from tasuki.wire.errors import BadHandle
from tests.extent import examples
from tests.limits import limit_s
from tests.slices import Cut, by_boxes, by_columns, by_rows, by_rows_and_columns, part_of
from tests.unit.boxes import boxes_in, partitions, shapes


def entry(name: str = "a", *, shape: tuple[int, ...] = (6, 5)) -> Entry:
    return Entry(name, "bfloat16", shape, (0,) * len(shape), shape)


def manifest() -> Manifest:
    return lay_out([entry("a"), entry("b", shape=(300,))], rank=0, num_ranks=1)


def with_entry(index: int, **changes: object) -> Manifest:
    good = manifest()
    entries = list(good.entries)
    entries[index] = replace(entries[index], **changes)
    return replace(good, entries=tuple(entries))


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"name": ""}, "name of 0 characters"),
        (0, {"name": "x" * 600}, "name of 600 characters"),
        (0, {"name": "b", "global_shape": (300,), "offsets": (0,), "sizes": (300,)}, "b: a slice is named twice"),
        (0, {"dtype": "complex64"}, "a: dtype 'complex64'"),
        (0, {"global_shape": ()}, "a: shape"),
        (0, {"sizes": (0, 5)}, r"a: slice \[0:0, 0:5\] is empty or not inside shape \(6, 5\)"),
        (0, {"offsets": (1, 0)}, r"a: slice \[1:7, 0:5\] is empty or not inside shape \(6, 5\)"),
        (0, {"offsets": (0, -1)}, r"a: slice \[0:6, -1:4\] is empty or not inside"),
        (0, {"offsets": (0,)}, r"a: 1 offsets and 2 sizes for shape \(6, 5\)"),
        (0, {"sizes": (6, 5, 1)}, r"a: 2 offsets and 3 sizes for shape \(6, 5\)"),
        (0, {"arena_offset": 257}, "a: arena_offset 257"),
        (1, {"arena_offset": 1 << 40}, "b: ends at byte"),
        (1, {"global_shape": (1 << 40,), "sizes": (1 << 40,)}, "b: ends at byte"),
        (1, {"arena_offset": 0}, "a and b overlap"),
    ],
)
def test_bad_entries_are_refused_by_name(index: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadHandle, match=message):
        check(with_entry(index, **changes))


ON_GPU = {"device_uuid": "b1946ac9", "chunk_bytes": (1 << 21, 1 << 21)}


@pytest.mark.parametrize(
    "changes",
    [{"chunk_bytes": ()}, {"chunk_bytes": (64,)}, {"chunk_bytes": (1 << 21, 0)}, {"chunk_bytes": (64,), "device_uuid": ""}],
)
def test_chunks_that_cannot_hold_the_arena_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadHandle, match="cannot hold an arena"):
        check(replace(manifest(), **{**ON_GPU, **changes}))
    with pytest.raises(BadHandle, match="1 to 252 chunks"):
        check(replace(manifest(), **{**ON_GPU, "chunk_bytes": (1 << 21,) * 253}))


IPC: dict[str, Any] = {
    "handle": b"\1c" + bytes(64),
    "num_bytes": 1 << 20,
    "offset": 512,
    "counter": b"/torch_1",
    "counter_offset": 3,
    "process_id": 7,
}


def ipc(**changes: Any) -> IpcMemory:
    return IpcMemory(**{**IPC, **changes})


@pytest.mark.parametrize("changes", [{}, ON_GPU, {"device_uuid": "b1946ac9", "ipc_memory": ipc()}])
def test_a_manifest_survives_the_wire(changes: dict[str, Any]) -> None:
    whole = replace(with_entry(0, global_shape=(9, 8), offsets=(1, 2)), **changes)
    assert from_proto(to_proto(whole)) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ipc_memory": ipc(handle=IPC["handle"][:40])}, "IPC handle of 40 bytes is truncated"),
        ({"ipc_memory": ipc(counter=b"x" * 600)}, "malformed"),
        ({"ipc_memory": ipc(num_bytes=64)}, "allocation of 64 bytes cannot hold"),
        ({"chunk_bytes": (1 << 21,)}, "either an IPC handle on a GPU or chunks"),
        ({"device_uuid": ""}, "either an IPC handle on a GPU or chunks"),
    ],
)
def test_ipc_memory_that_cannot_hold_the_arena_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadHandle, match=message):
        check(replace(manifest(), **{"device_uuid": "b1946ac9", "ipc_memory": ipc(), **changes}))


def test_a_header_anywhere_but_at_the_beginning_is_refused() -> None:
    message = to_proto(manifest())
    message.header_offset = 64
    with pytest.raises(BadHandle, match="header_offset is 64 and must be 0"):
        from_proto(message)


SHAPE = (7, 4)


def ranks(*boxes: Box, shape: tuple[int, ...] = SHAPE) -> list[Manifest]:
    """Manifests of ranks that hold one box each; an empty box has no entry."""
    return [
        lay_out([Entry("a", "bfloat16", shape, box.offsets, box.sizes)] if box.numel else [], rank=rank, num_ranks=len(boxes))
        for rank, box in enumerate(boxes)
    ]


@pytest.mark.parametrize("cut", [by_rows, by_columns, by_rows_and_columns, by_boxes])
@pytest.mark.parametrize("shape", [(7, 4), (2, 3), (5,), (3, 5, 2), (7, 1)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_uneven_and_empty_slices_of_all_ranks_are_complete(cut: Cut, shape: tuple[int, ...], num_ranks: int) -> None:
    check_complete(ranks(*(cut(shape, rank, num_ranks) for rank in range(num_ranks)), shape=shape))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ((((0, 0), (4, 4)), ((3, 0), (4, 4))), "[3:4, 0:4] of shape (7, 4) is published by two trainer ranks"),
        ((((0, 0), (3, 4)), ((4, 0), (3, 4))), "[3:4, 0:4] of shape (7, 4) is not published"),
        ((((0, 0), (4, 2)), ((4, 2), (3, 2))), "[0:4, 2:4] of shape (7, 4) is not published"),
    ],
)
def test_slices_that_overlap_or_are_missing_are_refused(boxes: tuple[tuple[tuple[int, int], ...], ...], message: str) -> None:
    with pytest.raises(BadHandle, match=re.escape(f"a: {message}")) as caught:
        check_complete(ranks(*(Box(*box) for box in boxes)))
    assert caught.value.metadata["tensor"] == "a"


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_random_boxes_are_refused_exactly_when_some_element_is_not_there_once(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    boxes = data.draw(partitions(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        index = data.draw(st.integers(0, len(boxes) - 1))
        box = data.draw(boxes_in(boxes[index]))
        boxes = [box if place == index else other for place, other in enumerate(boxes)]
    boxes += data.draw(st.lists(boxes_in(Box((0,) * len(shape), shape)), max_size=1))
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        part_of(counts, box).add_(1)
    shared, gap = first_overlap(boxes), first_gap(boxes, shape) if int(counts.max()) == 1 else None
    assert (shared is None) == (int(counts.max()) == 1)
    assert shared is None or int(part_of(counts, shared).min()) > 1
    assert shared is not None or (gap is None) == bool(counts.all())
    assert gap is None or (gap.numel > 0 and not part_of(counts, gap).any())
    if bool((counts == 1).all()):
        check_complete(ranks(*boxes, shape=shape))
    else:
        with pytest.raises(BadHandle, match="^a: "):
            check_complete(ranks(*boxes, shape=shape))


def test_a_gap_among_many_slices_of_many_dimensions_is_found_at_once() -> None:
    shape = (64,) * 8
    whole = Box((0,) * 8, shape)
    boxes = [Box(tuple(index if dim == index % 8 else 0 for dim in range(8)), (1,) * 8) for index in range(64)]
    started = time.process_time()
    gap = first_gap(boxes, shape)
    assert gap is not None and gap.intersection(whole) == gap and not any(gap.intersection(box) for box in boxes)
    assert time.process_time() - started < limit_s(1.0)


def test_ranks_that_disagree_about_a_shape_are_refused() -> None:
    first, second = (
        ranks(Box((0, 0), (4, 4)), Box((4, 0), (3, 4)))[0],
        ranks(Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), shape=(8, 4))[1],
    )
    with pytest.raises(BadHandle, match="disagree"):
        check_complete([first, second])
