"""Triton kernels that process a table (see table.py). Imported only where a GPU can run them."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton compiles these functions; annotations mark constants.

from __future__ import annotations

import triton
import triton.language as tl

from tasuki.transport import checksum, deltas, table

# Elements that copy_and_sum_tiles processes at a time.
_STEP_UNITS = tl.constexpr(256)
_BLOCK_WORDS = tl.constexpr(table.BLOCK_WORDS)
_STEP = tl.constexpr(checksum.STEP % checksum.MODULUS)
_MIX = tl.constexpr(checksum.MIX % checksum.MODULUS)
_KEY_STEP = tl.constexpr(checksum.KEY_STEP)
_KEY_MIX = tl.constexpr(checksum.KEY_MIX)
_GROUP = tl.constexpr(checksum.GROUP)
_MOST = tl.constexpr(deltas.MOST)
_FAR = tl.constexpr(deltas.FAR)
_MULTIPLY = tl.constexpr("mul.wide.s32 $0, $1, $2;")


@triton.jit
def _units(block, word, UNITS: tl.constexpr):
    """Rows and columns of the tile's units, and a mask of those that exist."""
    units = (word & 0x7FFFFFFF).to(tl.int32) + tl.arange(0, UNITS)
    num_units, num_cols = tl.load(block + 2).to(tl.int32), tl.load(block + 3).to(tl.int32)
    rows = tl.zeros((UNITS,), tl.int32)
    if num_cols < num_units:
        rows = units // num_cols
    return rows.to(tl.int64), (units - rows * num_cols).to(tl.int64), units < num_units


@triton.jit
def _address(start, PLACE: tl.constexpr, VECTOR: tl.constexpr):
    pointer = start.to(tl.pointer_type(PLACE))
    if VECTOR > 1:
        # The table has blocks for vectors only if this holds.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def copy_tiles(blocks, tiles, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, VECTOR: tl.constexpr, UNITS: tl.constexpr):
    """destination = source, with rounding to nearest if the types differ. First side: source; second: destination."""
    word = tl.load(tiles + tl.program_id(0))
    block = blocks + (word >> 32) * _BLOCK_WORDS
    rows, cols, is_there = _units(block, word, UNITS)
    within = tl.arange(0, VECTOR)[None, :]
    sources = (rows * tl.load(block + 4) + cols * tl.load(block + 6))[:, None] * VECTOR + within
    destinations = (rows * tl.load(block + 5) + cols * tl.load(block + 7))[:, None] * VECTOR + within
    source = _address(tl.load(block), SOURCE, VECTOR)
    destination = _address(tl.load(block + 1), DESTINATION, VECTOR)
    values = tl.load(source + sources, mask=is_there[:, None])
    tl.store(destination + destinations, values.to(DESTINATION), mask=is_there[:, None])


@triton.jit
def _keys(places):
    keys = (places + 1).to(tl.uint32) * _KEY_STEP
    keys = (keys ^ keys >> 15) * _KEY_MIX
    return keys ^ keys >> 13 | 1


@triton.jit
def terms(values, firsts, within, HELD: tl.constexpr, BITS: tl.constexpr, CAST: tl.constexpr, VECTOR: tl.constexpr):
    """Sum of bit pattern * weight(index) over each unit, as in checksum.checksum. firsts: index of each unit's first element."""
    if CAST != HELD:
        values = values.to(CAST)
    if BITS != CAST:
        values = values.to(BITS, bitcast=True)
    mixed = (firsts // _GROUP).to(tl.uint64) * _STEP
    mixed ^= mixed >> 32
    mixed *= _MIX
    high = (mixed >> 32).to(tl.uint32)
    low = mixed.to(tl.uint32) ^ high
    # A vector is a group: its first index is a multiple of the group's size.
    keys = _keys(within if VECTOR == _GROUP else (firsts % _GROUP).to(tl.int32)[:, None])
    weights = (low[:, None] * keys + high[:, None] | 1).to(tl.int32)
    # A single instruction; 64-bit operands would take six.
    patterns = values.to(tl.int32)
    terms = tl.inline_asm_elementwise(_MULTIPLY, "=l,r,r", [patterns, weights], dtype=tl.int64, is_pure=True, pack=1)
    return tl.sum(terms, axis=1)


@triton.jit
def copy_and_sum_tiles(
    blocks,
    tiles,
    sums,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    BITS: tl.constexpr,
    CAST: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Same as copy_tiles, but reads back what it wrote, bypassing the first cache, and adds it to sums[slot] like sum_tiles.

    If nothing is cast, SOURCE is DESTINATION is BITS; else CAST is the type whose bit patterns are counted.
    WORDS: of a block. Without strides of their own, indices run like the source's elements from the block's index on.
    """
    word = tl.load(tiles + tl.program_id(0))
    block = blocks + (word >> 32) * WORDS
    within = tl.arange(0, VECTOR)[None, :]
    totals = tl.zeros((_STEP_UNITS,), tl.int64)
    # In steps, because the registers for a whole tile would leave few programs on a processor.
    for step in range(UNITS // _STEP_UNITS):
        rows, cols, is_there = _units(block, word + step * _STEP_UNITS, _STEP_UNITS)
        sources = (rows * tl.load(block + 4) + cols * tl.load(block + 6)) * VECTOR
        destinations = (rows * tl.load(block + 5) + cols * tl.load(block + 7)) * VECTOR
        source = _address(tl.load(block), SOURCE, VECTOR) + (sources[:, None] + within)
        destination = _address(tl.load(block + 1), DESTINATION, VECTOR) + (destinations[:, None] + within)
        tl.store(destination, tl.load(source, mask=is_there[:, None]).to(DESTINATION), mask=is_there[:, None])
        # Volatile: reads from the GPU's memory system, not from a register or this processor's cache.
        held = tl.load(destination, mask=is_there[:, None], other=0, volatile=True)
        places = sources if WORDS == _BLOCK_WORDS else (rows * tl.load(block + 10) + cols * tl.load(block + 11)) * VECTOR
        totals += terms(held, tl.load(block + 9) + places, within, DESTINATION, BITS, CAST, VECTOR)
    tl.atomic_add(sums + tl.load(block + 8), tl.sum(totals, axis=0), sem="relaxed")


@triton.jit
def encode_and_sum_tiles(
    blocks,
    tiles,
    shift,
    sums,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    BITS: tl.constexpr,
    CAST: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Same as copy_and_sum_tiles for destinations of 2-byte elements, and writes by how much each moves, as in deltas.encode.

    shift: of Deltas.
    """
    word = tl.load(tiles + tl.program_id(0))
    block = blocks + (word >> 32) * WORDS
    within = tl.arange(0, VECTOR)[None, :]
    totals = tl.zeros((_STEP_UNITS,), tl.int64)
    for step in range(UNITS // _STEP_UNITS):
        rows, cols, is_there = _units(block, word + step * _STEP_UNITS, _STEP_UNITS)
        sources = (rows * tl.load(block + 4) + cols * tl.load(block + 6)) * VECTOR
        destinations = (rows * tl.load(block + 5) + cols * tl.load(block + 7)) * VECTOR
        start = tl.load(block + 1)
        values = tl.load(_address(tl.load(block), SOURCE, VECTOR) + (sources[:, None] + within), mask=is_there[:, None])
        new = values.to(DESTINATION)
        if BITS != DESTINATION:
            new = new.to(BITS, bitcast=True)
        places = _address(start, BITS, VECTOR) + (destinations[:, None] + within)
        old = tl.load(places, mask=is_there[:, None], other=0)
        differences = (new - old).to(tl.int32)
        is_far = tl.max(tl.abs(differences), axis=1) > _MOST
        words = tl.sum((differences & 0xF) << (4 * (within // 2) + 16 * (within % 2)), axis=1)
        words = tl.where(is_far, _FAR, words)
        tl.store((((start + 2 * destinations) >> 2) + shift).to(tl.pointer_type(tl.int32)), words, mask=is_there)
        is_moved = is_there & (words != 0)
        tl.store(places, new, mask=is_moved[:, None])
        # What did not move has just been read from there.
        held = tl.load(places, mask=is_moved[:, None], other=old, volatile=True)
        indices = sources if WORDS == _BLOCK_WORDS else (rows * tl.load(block + 10) + cols * tl.load(block + 11)) * VECTOR
        totals += terms(held, tl.load(block + 9) + indices, within, BITS, BITS, BITS, VECTOR)
    tl.atomic_add(sums + tl.load(block + 8), tl.sum(totals, axis=0), sem="relaxed")


@triton.jit
def _places(units, num_units, num_cols, source_row, destination_row, index_row):
    """Units of vectors on both sides and among the indices, whose columns are contiguous."""
    sources = units.to(tl.int64)
    destinations, indices = sources, sources
    if num_cols < num_units:
        rows = units // num_cols
        cols = (units - rows * num_cols).to(tl.int64)
        sources = rows.to(tl.int64) * source_row + cols
        destinations = rows.to(tl.int64) * destination_row + cols
        indices = rows.to(tl.int64) * index_row + cols
    return sources, destinations, indices


@triton.jit
def _pairs(start, units):
    """Pointers to the units' 2-byte elements, two at a time: [units, 4] int32."""
    return _address(start, tl.int32, 4) + (units[:, None] * 4 + tl.arange(0, 4)[None, :])


@triton.jit
def _moved(pairs, words):
    """Adds a word's differences to the elements of [units, 4] pairs; each element wraps by itself."""
    # Plus 8, from 1 to 15. Each sum is right in one half, which no carry reaches from the other.
    differences = (words ^ _FAR).to(tl.uint32)[:, None] >> (4 * tl.arange(0, 4)[None, :])
    firsts = pairs + (differences & 0xF).to(tl.int32) - 8
    seconds = pairs + (differences & 0xF0000).to(tl.int32) - 0x80000
    return firsts & 0xFFFF | seconds & -0x10000


@triton.jit
def _pair_terms(pairs, groups):
    """Same as terms for [units, 4] pairs of 2-byte elements. groups: index of each unit's first element, in groups."""
    mixed = groups.to(tl.uint64) * _STEP
    mixed ^= mixed >> 32
    mixed *= _MIX
    high = (mixed >> 32).to(tl.uint32)
    low = mixed.to(tl.uint32) ^ high
    places = 2 * tl.arange(0, 4)[None, :]
    first_weights = (low[:, None] * _keys(places) + high[:, None] | 1).to(tl.int32)
    second_weights = (low[:, None] * _keys(places + 1) + high[:, None] | 1).to(tl.int32)
    firsts_of_pairs, seconds = [pairs << 16 >> 16, first_weights], [pairs >> 16, second_weights]
    terms = tl.inline_asm_elementwise(_MULTIPLY, "=l,r,r", firsts_of_pairs, dtype=tl.int64, is_pure=True, pack=1)
    terms += tl.inline_asm_elementwise(_MULTIPLY, "=l,r,r", seconds, dtype=tl.int64, is_pure=True, pack=1)
    return tl.sum(terms, axis=1)


@triton.jit
def apply_and_sum_tiles(
    blocks,
    tiles,
    shifts,
    sums,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    BITS: tl.constexpr,
    CAST: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Same as copy_and_sum_tiles for vectors of 2-byte elements whose destinations hold the previous publication.

    Adds the sources' deltas, and reads a source only where these are marked. shifts: of each block's Deltas.
    """
    word = tl.load(tiles + tl.program_id(0))
    block = blocks + (word >> 32) * WORDS
    totals = tl.zeros((_STEP_UNITS,), tl.int64)
    source, destination, first_group = tl.load(block), tl.load(block + 1), tl.load(block + 9) // _GROUP
    num_units, num_cols = tl.load(block + 2).to(tl.int32), tl.load(block + 3).to(tl.int32)
    source_row, destination_row = tl.load(block + 4), tl.load(block + 5)
    index_row = source_row if WORDS == _BLOCK_WORDS else tl.load(block + 10)
    all_words = ((source >> 2) + tl.load(shifts + (word >> 32))).to(tl.pointer_type(tl.int32))
    units = (word & 0x7FFFFFFF).to(tl.int32) + tl.arange(0, _STEP_UNITS)
    end = tl.minimum(num_units, (word & 0x7FFFFFFF).to(tl.int32) + UNITS)
    # Another GPU's memory answers late. So words are requested two steps ahead, and what they ask for one step ahead.
    sources, destinations, groups = _places(units, num_units, num_cols, source_row, destination_row, index_row)
    is_there, next_units = units < end, units + _STEP_UNITS
    # Units that do not exist do not move.
    words = tl.load(all_words + sources, mask=is_there, other=0)
    next_sources, next_destinations, next_groups = _places(
        next_units, num_units, num_cols, source_row, destination_row, index_row
    )
    is_next_there = next_units < end
    next_words = tl.load(all_words + next_sources, mask=is_next_there, other=0)
    held = tl.load(_pairs(destination, destinations), mask=is_there[:, None], other=0)
    whole = tl.load(_pairs(source, sources), mask=(words == _FAR)[:, None], other=0)
    for step in range(UNITS // _STEP_UNITS):
        later_units = units + (step + 2) * _STEP_UNITS
        later_sources, later_destinations, later_groups = _places(
            later_units, num_units, num_cols, source_row, destination_row, index_row
        )
        is_later_there = later_units < end
        later_words = tl.load(all_words + later_sources, mask=is_later_there, other=0)
        next_held = tl.load(_pairs(destination, next_destinations), mask=is_next_there[:, None], other=0)
        next_whole = tl.load(_pairs(source, next_sources), mask=(next_words == _FAR)[:, None], other=0)

        new = tl.where((words == _FAR)[:, None], whole, _moved(held, words))
        places = _pairs(destination, destinations)
        is_moved = (words != 0)[:, None]
        tl.store(places, new, mask=is_moved)
        # Volatile, as in copy_and_sum_tiles. What does not move has just been read from there.
        read = tl.load(places, mask=is_moved, other=held, volatile=True)
        totals += _pair_terms(read, first_group + groups)

        sources, destinations, groups = next_sources, next_destinations, next_groups
        words, held, whole = next_words, next_held, next_whole
        next_sources, next_destinations, next_groups = later_sources, later_destinations, later_groups
        is_next_there, next_words = is_later_there, later_words
    tl.atomic_add(sums + tl.load(block + 8), tl.sum(totals, axis=0), sem="relaxed")


@triton.jit
def sum_tiles(
    blocks, tiles, sums, HELD: tl.constexpr, BITS: tl.constexpr, CAST: tl.constexpr, VECTOR: tl.constexpr, UNITS: tl.constexpr
):
    """sums[slot] += sum of bit pattern * weight(index), as in checksum.checksum. First side: memory; second: indices.

    CAST: type whose bit patterns are counted if it differs from HELD; HELD may be BITS.
    """
    word = tl.load(tiles + tl.program_id(0))
    block = blocks + (word >> 32) * _BLOCK_WORDS
    rows, cols, is_there = _units(block, word, UNITS)
    within = tl.arange(0, VECTOR)[None, :]
    places = (rows * tl.load(block + 4) + cols * tl.load(block + 6))[:, None] * VECTOR + within
    values = tl.load(_address(tl.load(block), HELD, VECTOR) + places, mask=is_there[:, None], other=0)
    firsts = tl.load(block + 1) + (rows * tl.load(block + 5) + cols * tl.load(block + 7)) * VECTOR
    totals = terms(values, firsts, within, HELD, BITS, CAST, VECTOR)
    tl.atomic_add(sums + tl.load(block + 8), tl.sum(totals, axis=0), sem="relaxed")
