"""Copy plans: pieces cut by trainer rows, and the account of what is written."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.transport.manifest import Entry
from tasuki.transport.plan import (
    Constant,
    CopyPlan,
    FallbackWrite,
    Piece,
    Slice,
    check_coverage,
    count_uncovered,
    split_by_rows,
    whole,
)
from tasuki.wire.errors import WeightsCorrupt


def entries(shape: tuple[int, ...], *cuts: int) -> list[Entry]:
    bounds = [0, *cuts, shape[0]]
    return [Entry("t", "bfloat16", shape, start, end - start) for start, end in pairwise(bounds) if end > start]


def slice_of(view: torch.Tensor) -> Slice:
    return Slice(view.storage_offset(), tuple(view.shape), view.stride())


def replay(source: torch.Tensor, view: torch.Tensor, *cuts: int) -> torch.Tensor:
    """Copies the parts of `view`, a view of `source`, into a new tensor by way of the shards."""
    destination = torch.full(view.shape, -1, dtype=source.dtype)
    shards = entries(tuple(source.shape), *cuts)
    for copy in split_by_rows(Piece("t", slice_of(view), "p", whole(view.shape)), shards):
        shard = source[copy.entry.row_start : copy.entry.row_start + copy.entry.num_rows].clone()
        values = shard.as_strided(copy.source.shape, copy.source.strides, copy.source.offset)
        destination.as_strided(copy.destination.shape, copy.destination.strides, copy.destination.offset).copy_(values)
    return destination


@pytest.mark.parametrize("cuts", [(), (3,), (4,), (1, 2, 5)])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[2:6],
        lambda t: t[:, 1:3],
        lambda t: t.t(),
        lambda t: t[1::2],
        lambda t: t.reshape(-1)[5:23],
        lambda t: t.view(7, 2, 2)[:, 1],
        lambda t: t[3:3],
        lambda t: t.view(-1).unflatten(0, (4, 7)).transpose(0, 1),
    ],
)
def test_any_view_arrives_whole_from_uneven_shards(view, cuts: tuple[int, ...]) -> None:
    source = torch.arange(28).view(7, 4)
    assert torch.equal(replay(source, view(source), *cuts), view(source))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_boxes_arrive_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    source = torch.arange(torch.tensor(shape).prod()).view(shape)
    view = source
    for dim, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        view = view.narrow(dim, start, data.draw(st.integers(1, size - start)))
    if data.draw(st.booleans()):
        view = view.transpose(0, -1)
    cuts = sorted(data.draw(st.sets(st.integers(1, shape[0] - 1), max_size=3))) if shape[0] > 1 else []
    assert torch.equal(replay(source, view, *cuts), view)


def test_a_slice_of_few_rows_makes_few_copies() -> None:
    source = Slice(100 * 64, (4000, 16), (64, 1))
    piece = Piece("t", source, "p", whole((4000, 16)))
    assert len(split_by_rows(piece, entries((5000, 64), 2500))) == 2


def covered(*writes: Slice, numel: int = 24) -> CopyPlan:
    return CopyPlan(tuple(Piece("t", write, "p", write) for write in writes), (), (), ())


def test_pieces_constants_and_fallbacks_add_up_to_a_whole_parameter() -> None:
    plan = CopyPlan(
        (Piece("t", whole((3, 4)), "p", whole((3, 4))),),
        (Constant("p", whole((1, 4), offset=12), 0.0),),
        ("f",),
        (FallbackWrite("p", Slice(16, (2, 4), (4, 1))),),
    )
    check_coverage(plan, {"p": 24})


@pytest.mark.parametrize(
    ("writes", "missing", "repeated"),
    [
        ((whole((5, 4)),), 4, 0),
        ((whole((5, 4)), Slice(16, (2, 4), (4, 1))), 0, 4),
        ((Slice(0, (6, 2), (4, 1)),), 12, 0),
        ((), 24, 0),
    ],
)
def test_what_is_missing_or_repeated_is_counted_and_named(writes: tuple[Slice, ...], missing: int, repeated: int) -> None:
    with pytest.raises(
        WeightsCorrupt, match=f"p: of 24 elements {missing} are not written and {repeated} are written"
    ) as caught:
        check_coverage(covered(*writes), {"p": 24})
    assert caught.value.metadata["tensors"] == "p"


def test_a_parameter_that_nothing_writes_is_named() -> None:
    with pytest.raises(WeightsCorrupt, match="q: of 8 elements 8"):
        check_coverage(covered(whole((24,))), {"p": 24, "q": 8})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 7), st.integers(1, 8)), max_size=4))
def test_counts_agree_with_counting_element_by_element(boxes: list[tuple[int, int, int, int]]) -> None:
    counts = torch.zeros(6, 8, dtype=torch.int64)
    slices = []
    for row, rows, column, columns in boxes:
        box = counts[row : row + rows, column : column + columns]
        box += 1
        slices.append(slice_of(box))
    assert count_uncovered(48, slices) == (int((counts == 0).sum()), int((counts > 1).sum()))


def test_large_weights_are_counted_on_a_small_mask() -> None:
    rows = 150_000
    halves = [Slice(rank * 4096, (rows, 4096), (8192, 1)) for rank in range(2)]
    assert count_uncovered(rows * 8192, halves) == (0, 0)


def test_a_slice_beyond_the_end_counts_as_wrong_everywhere() -> None:
    assert count_uncovered(24, [whole((25,))]) == (24, 24)
