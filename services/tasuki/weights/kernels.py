"""Triton kernels that process a table (see table.py). Imported only where a GPU can run them."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton compiles these functions; annotations mark constants.

import triton
import triton.language as tl

from tasuki.weights import checksum, table

# Elements that copy_and_sum_tiles processes at a time.
_STEP_UNITS = tl.constexpr(256)
_BLOCK_WORDS = tl.constexpr(table.BLOCK_WORDS)
_STEP = tl.constexpr(checksum.STEP % checksum.MODULUS)
_MIX = tl.constexpr(checksum.MIX % checksum.MODULUS)
_KEY_STEP = tl.constexpr(checksum.KEY_STEP)
_KEY_MIX = tl.constexpr(checksum.KEY_MIX)
_GROUP = tl.constexpr(checksum.GROUP)
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
    """destination = source, rounded to nearest if the types differ; reads it back, bypassing the first cache, and sums it like sum_tiles.

    First side: source; second: destination.
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
