"""Physical bytes of a tag: its tensors in the chunks of an arena."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.memory.granularity import GROWING_CHUNK_BYTES, arena_bytes, bytes_in_chunks, export_bytes
from tasuki.memory.pool import pool_chunk_bytes
from tasuki.planner.layout import Layout


def tag_bytes(layout: Layout, tensors: Sequence[int], *, grows: bool = False) -> int:
    """Bytes after tensors of these sizes were made in this order. grows: whether the tag is mapped in parts, as a growing KV cache is."""
    chunk = _equal_chunk(layout, grows=grows)
    return arena_bytes(tuple(tensors), device=layout.device) if chunk is None else bytes_in_chunks(tensors, chunk_bytes=chunk)


def published_bytes(layout: Layout, num_bytes: int) -> int:
    """Bytes for published copies, which lie in one block."""
    chunk = _equal_chunk(layout, grows=False)
    return export_bytes(num_bytes, device=layout.device) if chunk is None else bytes_in_chunks([num_bytes], chunk_bytes=chunk)


def _equal_chunk(layout: Layout, *, grows: bool) -> int | None:
    """The one size of the arena's chunks on a CPU; None if they have several."""
    if layout.device == "cpu" and layout.has_pool and layout.budget_bytes is not None:
        return pool_chunk_bytes(layout.budget_bytes)
    return GROWING_CHUNK_BYTES["cpu"] if layout.device == "cpu" and grows else None
