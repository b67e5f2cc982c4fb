"""Pieces cut by the slices of trainer ranks: whatever view a loader reads arrives whole, in few copies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.weights.manifest import Box, Entry
from tasuki.weights.plan import Piece, Slice, whole
from tasuki.weights.split import indices_of, split_by_entries
from tests.extent import examples
from tests.slices import Cut, by_boxes, by_columns, by_rows, by_rows_and_columns, part_of, strided
from tests.unit.boxes import partitions, shapes


def entries(shape: tuple[int, ...], boxes: list[Box]) -> list[Entry]:
    return [Entry("t", "bfloat16", shape, box.offsets, box.sizes) for box in boxes if box.numel]


def shared(shape: tuple[int, ...], cut: Cut, num_ranks: int) -> list[Entry]:
    return entries(shape, [cut(shape, rank, num_ranks) for rank in range(num_ranks)])


def replay(source: torch.Tensor, view: torch.Tensor, held: list[Entry]) -> torch.Tensor:
    """Copies the parts of `view`, a view of `source`, into a new tensor by way of the shards."""
    destination = torch.full(view.shape, -1, dtype=source.dtype)
    piece = Piece("t", Slice(view.storage_offset(), tuple(view.shape), view.stride()), "p", whole(view.shape))
    for copy in split_by_entries(piece, held):
        shard = part_of(source, copy.entry.box).clone()
        values = strided(shard, copy.source)
        assert torch.equal(values, strided(source, copy.where)), "the indices are those of the values"
        target = strided(destination, copy.destination)
        assert bool((target == -1).all()), "an element is written once"
        target.copy_(values)
    return destination


VIEWS = [
    lambda t: t.reshape(-1)[5:23],
    lambda t: t.reshape(-1)[1::3],
    lambda t: t.view(7, 2, 2)[:, 1],
    lambda t: t[3:3],
    lambda t: t.view(-1).unflatten(0, (4, 7)).transpose(0, 1),
    lambda t: t[:, :1].expand(7, 5),
]


@pytest.mark.parametrize("cut", [by_rows, by_columns, by_rows_and_columns, by_boxes])
@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("view", VIEWS)
def test_any_view_arrives_whole_from_uneven_shards(view, num_ranks: int, cut: Cut) -> None:
    source = torch.arange(28).view(7, 4)
    assert torch.equal(replay(source, view(source), shared((7, 4), cut, num_ranks)), view(source))


@st.composite
def views(draw: st.DrawFn, source: torch.Tensor) -> torch.Tensor:
    """Draws views as loaders make them: slices, steps, transposed and reshaped."""
    view = source
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1))
        kind = draw(st.sampled_from(["narrow", "transpose", "flatten", "unflatten", "step"]))
        if kind == "narrow":
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "transpose":
            view = view.transpose(dim, -1)
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "unflatten":
            factors = [size for size in range(1, view.shape[dim] + 1) if view.shape[dim] % size == 0]
            view = view.unflatten(dim, (-1, draw(st.sampled_from(factors))))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(2, 3))),)]
    return view


@settings(max_examples=examples(500), deadline=None)
@given(st.data())
def test_random_views_arrive_whole_from_random_boxes(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    source = torch.arange(math.prod(shape)).view(shape)
    view = data.draw(views(source))
    assert torch.equal(replay(source, view, entries(shape, data.draw(partitions(shape)))), view)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_indices_of_an_entry_are_those_of_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    source = torch.arange(math.prod(shape)).view(shape)
    for entry in entries(shape, data.draw(partitions(shape))):
        assert torch.equal(strided(source, indices_of(entry)), part_of(source, entry.box))


@pytest.mark.parametrize(
    ("cut", "source", "num_copies"),
    [
        (by_rows, Slice(100 * 64, (4000, 16), (64, 1)), 4),
        (by_rows, Slice(0, (5000 * 64,), (1,)), 4),
        (by_columns, Slice(100 * 64, (4000, 64), (64, 1)), 4),
        (by_columns, Slice(8, (5000, 16), (64, 1)), 2),
        (by_boxes, Slice(8, (5000, 40), (64, 1)), 4),
        # A run of the flattened tensor: parts of its first and last row, and the rows between.
        (by_columns, Slice(40, (64 * 4000,), (1,)), 9),
    ],
)
def test_a_slice_of_many_rows_makes_few_copies(cut: Cut, source: Slice, num_copies: int) -> None:
    copies = split_by_entries(Piece("t", source, "p", whole(source.shape)), shared((5000, 64), cut, 4))
    assert len(copies) == num_copies
    assert sum(copy.source.numel for copy in copies) == source.numel
