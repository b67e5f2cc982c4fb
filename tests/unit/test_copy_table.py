"""Tables for the GPU's copy kernels, executed here by torch, element by element, and compared with copy_ and checksum."""

import random
from dataclasses import replace

import pytest
import torch

from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.copies import HostCopies, ViewCopy, copy_tables
from tasuki.weights.manifest import Entry
from tasuki.weights.plan import Piece, Slice, whole
from tasuki.weights.split import split_by_entries
from tasuki.weights.table import BLOCK_WORDS, TILE_UNITS, Table
from tests.extent import crossed, examples
from tests.slices import Cut, by_boxes, by_columns, by_rows, by_rows_and_columns, part_of, strided

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def elements(table: Table) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """For each tile, as the kernels compute them: the start of source and target, the elements' distances from it, and the slot."""
    tiles = []
    for word in table.tiles.tolist():
        first, second, units, cols, first_row, second_row, first_col, second_col, slot, *_ = table.blocks[word >> 32].tolist()
        unit = torch.arange(word & 0x7FFFFFFF, min(units, (word & 0x7FFFFFFF) + TILE_UNITS))
        row, col, within = unit // cols, unit % cols, torch.arange(table.vector)
        places = [
            ((row * row_stride + col * col_stride)[:, None] * table.vector + within).flatten()
            for row_stride, col_stride in ((first_row, first_col), (second_row, second_col))
        ]
        tiles.append((torch.tensor([first, second]), *places, slot))
    return tiles


def run(held: torch.Tensor, source: torch.Tensor, *, sources: torch.Tensor, destinations: torch.Tensor) -> list[int]:
    """Executes a copy, within these two tensors. Returns the width of every table's units."""
    written = torch.zeros(destinations.numel(), dtype=torch.int32)
    tables = copy_tables([ViewCopy(held=held, source=source, where=whole(held.shape))], device=CPU, first_owner=0)
    for _, table in tables:
        for starts, places, targets, _ in elements(table):
            places = places + (int(starts[0]) - sources.data_ptr()) // sources.element_size()
            targets = targets + (int(starts[1]) - destinations.data_ptr()) // destinations.element_size()
            destinations.view(-1)[targets] = sources.view(-1)[places].to(destinations.dtype)
            written[targets] += 1
    assert int(written.max()) <= 1, "an element is written once"
    return [table.vector for _, table in tables]


def random_view(tensor: torch.Tensor, shape: tuple[int, ...], rng: random.Random) -> torch.Tensor:
    """Draws a slice of a contiguous tensor, of this shape."""
    for dim, size in enumerate(shape):
        spare = tensor.shape[dim] - size
        tensor = tensor.narrow(dim, rng.choice([0, spare, rng.randint(0, spare)]), size)
    return tensor


def test_the_tables_of_random_copies_do_what_copy_does() -> None:
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(examples(400)):
        shape = tuple(rng.choice([1, 2, 3, 8, 16, 40, 64]) for _ in range(rng.randint(1, 4)))
        padded = tuple(size + rng.choice([0, 0, 1, 8]) for size in shape)
        sources = torch.randn(padded, generator=generator).to(rng.choice(DTYPES))
        destinations = torch.zeros(tuple(size + rng.choice([0, 0, 3, 8]) for size in shape), dtype=rng.choice(DTYPES))
        source, destination = random_view(sources, shape, rng), random_view(destinations, shape, rng)
        if rng.random() < 0.2:
            order = rng.sample(range(len(shape)), len(shape))
            source, destination = source.permute(order), destination.permute(order)
        expected = destinations.clone()
        expected.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(source)
        run(destination, source, sources=sources, destinations=destinations)
        assert torch.equal(destinations, expected)


def test_a_transposed_copy_and_an_expanded_constant_go_element_by_element() -> None:
    sources, destinations = torch.randn(64, 64), torch.zeros(64, 64)
    assert run(destinations, sources.t(), sources=sources, destinations=destinations) == [1]
    assert torch.equal(destinations, sources.t())
    constant = torch.tensor(3.0)
    assert run(destinations[60:], constant.expand(4, 64), sources=constant, destinations=destinations) == [1]
    assert bool((destinations[60:] == 3).all()) and torch.equal(destinations[:60], sources.t()[:60])


def test_equal_copies_at_other_alignments_are_lowered_otherwise() -> None:
    sources, destinations = torch.arange(200, dtype=torch.float32), torch.zeros(200)
    for first, width in ((0, 8), (4, 8), (1, 1), (2, 1), (8, 8)):
        held, source = destinations[first : first + 32], sources[first : first + 32]
        assert run(held, source, sources=sources, destinations=destinations) == [width]
        assert torch.equal(held, source)


def test_tiles_of_all_owners_alternate_and_end_together() -> None:
    sources = [torch.zeros(num_tiles * TILE_UNITS * 8, dtype=torch.bfloat16) for num_tiles in (8, 4, 4)]
    copies = [
        ViewCopy(held=torch.empty_like(source), source=source, where=whole(source.shape), owner=owner)
        for owner, source in enumerate(sources)
    ]
    orders = []
    for first_owner in (1, 2):
        [(_, table)] = copy_tables(copies, device=CPU, first_owner=first_owner)
        assert sorted(table.tiles.tolist()) == [
            block << 32 | tile * TILE_UNITS for block, num in enumerate((8, 4, 4)) for tile in range(num)
        ]
        orders.append([word >> 32 for word in table.tiles.tolist()])
        assert all(orders[-1][start : start + 4].count(0) == 2 for start in range(0, 16, 4))
    assert [order[0] for order in orders] == [1, 2]


def test_the_tables_of_checksums_add_up_to_the_checksum() -> None:
    generator = torch.Generator().manual_seed(0)
    held = torch.randn((48, 96), generator=generator).bfloat16()
    views = [
        ViewCopy(held=held, where=whole((48, 96), offset=5)),
        ViewCopy(held=held[8:24, 16:80], where=Slice(640, (16, 64), (128, 1)), slot=1),
        ViewCopy(held=held[1:8, 3:20], where=Slice(7, (7, 17), (1, 40)), slot=2),
    ]
    sums = [0] * len(views)
    for _, table in copy_tables(views, device=CPU, first_owner=0):
        for starts, places, indices, slot in elements(table):
            places = places + (int(starts[0]) - held.data_ptr()) // 2
            for value, index in zip(held.view(-1)[places], (indices + int(starts[1])).tolist(), strict=True):
                sums[slot] = (sums[slot] + checksum(value.view(1), Slice(index, (1,), (1,)))) % MODULUS
    assert sums == host_sums(views)


def host_sums(copies: list[ViewCopy], *, num_sums: int = 3) -> list[int]:
    on_host = HostCopies(copies, num_sums=num_sums)
    on_host.start()
    return on_host.sums().tolist()


def summed(copies: list[ViewCopy], *, sources: torch.Tensor, num_sums: int) -> list[int]:
    """Sums as the copying kernel computes them; without strides for indices, an element's index is its place in the source."""
    sums = [0] * num_sums
    for _, table in copy_tables(copies, device=CPU, first_owner=0):
        for word, (starts, places, _, slot) in zip(table.tiles.tolist(), elements(table), strict=True):
            first = int(starts[0] - sources.data_ptr()) // sources.element_size()
            block = table.blocks[word >> 32]
            indices = int(block[9]) + (places if len(block) == BLOCK_WORDS else own_indices(table, word))
            for place, index in zip(places.tolist(), indices.tolist(), strict=True):
                value = sources.view(-1)[first + place].view(1)
                sums[slot] = (sums[slot] + checksum(value, Slice(index, (1,), (1,)))) % MODULUS
    return sums


def own_indices(table: Table, word: int) -> torch.Tensor:
    """Indices of a tile whose block has strides for them, starting at the block's index."""
    block = table.blocks[word >> 32].tolist()
    unit = torch.arange(word & 0x7FFFFFFF, min(block[2], (word & 0x7FFFFFFF) + TILE_UNITS))
    row, col = unit // block[3], unit % block[3]
    return ((row * block[10] + col * block[11])[:, None] * table.vector + torch.arange(table.vector)).flatten()


def test_the_tables_of_summed_copies_add_up_to_the_checksums_of_the_slices() -> None:
    generator = torch.Generator().manual_seed(0)
    # Rows [10, 58) of a tensor of 96 columns, whose parts are copied to views of all kinds.
    sources = torch.randn((48, 96), generator=generator).bfloat16()
    first = 10 * 96
    slices = [
        Slice(0, (48, 8), (96, 1)),
        Slice(16, (32, 2, 24), (96, 40, 1)),
        Slice(9, (17, 7), (1, 96)),
        Slice(40 * 96 + 8, (8, 16), (96, 1)),
    ]
    views = [sources.as_strided(at.shape, at.strides, at.offset) for at in slices]
    copies = [
        ViewCopy(
            held=torch.zeros(at.shape, dtype=torch.float32),
            source=view,
            where=replace(at, offset=first + at.offset),
            slot=slot % 3,
        )
        for slot, (at, view) in enumerate(zip(slices, views, strict=True))
    ]
    expected = [0, 0, 0]
    for copy in copies:
        expected[copy.slot] = (expected[copy.slot] + checksum(copy.source, copy.where)) % MODULUS
    assert summed(copies, sources=sources, num_sums=3) == expected
    assert host_sums(copies) == expected
    assert all(torch.equal(copy.held, view.float()) for copy, view in zip(copies, views, strict=True))
    copies[1].source.view(torch.int16)[0, 0, 0] ^= 1
    assert summed(copies, sources=sources, num_sums=3) != expected


def copies_from(arena: torch.Tensor, tensor: torch.Tensor, views: list[torch.Tensor], *, cut: Cut) -> list[ViewCopy]:
    """Copies of views of `tensor` from the slices of four ranks, laid out one after the other in `arena`."""
    copies: list[ViewCopy] = []
    targets = [torch.full(view.shape, torch.nan, dtype=tensor.dtype) for view in views]
    start = 0
    for owner in range(4):
        box = cut(tuple(tensor.shape), owner, 4)
        if not box.numel:
            continue
        held = arena[start : start + box.numel].view(box.sizes)
        held.copy_(part_of(tensor, box))
        entry = Entry("t", "bfloat16", tuple(tensor.shape), box.offsets, box.sizes)
        for slot, (view, target) in enumerate(zip(views, targets, strict=True)):
            piece = Piece("t", Slice(view.storage_offset(), tuple(view.shape), view.stride()), "p", whole(view.shape))
            for copy in split_by_entries(piece, [entry]):
                source = held.as_strided(copy.source.shape, copy.source.strides, start + copy.source.offset)
                held_part = strided(target, copy.destination)
                copies.append(ViewCopy(held=held_part, source=source, owner=owner, where=copy.where, slot=slot))
        start += -(-box.numel // 128) * 128
    return copies


@pytest.mark.parametrize(("cut", "shape"), crossed([by_rows, by_columns, by_rows_and_columns, by_boxes], [(24, 64), (30, 36)]))
def test_what_is_read_from_any_slices_sums_to_the_checksums_of_the_whole(cut: Cut, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    views = [tensor[:, : shape[1] // 2], tensor[5:], tensor[:5].t()]
    arena = torch.zeros(tensor.numel() + 4 * 128, dtype=torch.bfloat16)
    copies = copies_from(arena, tensor, views, cut=cut)
    wheres = [Slice(view.storage_offset(), tuple(view.shape), view.stride()) for view in views]
    expected = [checksum(view, where) for view, where in zip(views, wheres, strict=True)]
    assert summed(copies, sources=arena, num_sums=3) == expected
    assert host_sums(copies) == expected
    copies[0].source.view(torch.int16)[0, 0] ^= 1
    assert summed(copies, sources=arena, num_sums=3) != expected
