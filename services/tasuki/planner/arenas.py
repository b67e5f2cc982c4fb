"""Physical bytes of a tag: its tensors in the chunks of an arena."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.memory.granularity import arena_bytes, bytes_in_chunks, export_bytes
from tasuki.memory.pool import pool_chunk_bytes
from tasuki.planner.layout import Layout


def tag_bytes(layout: Layout, tensors: Sequence[int]) -> int:
    """Bytes after tensors of these sizes were made in this order."""
    chunk = _equal_chunk(layout)
    return arena_bytes(tuple(tensors), device=layout.device) if chunk is None else bytes_in_chunks(tensors, chunk_bytes=chunk)


def published_bytes(layout: Layout, num_bytes: int) -> int:
    """Bytes for published copies, which lie in one block."""
    chunk = _equal_chunk(layout)
    return export_bytes(num_bytes, device=layout.device) if chunk is None else bytes_in_chunks([num_bytes], chunk_bytes=chunk)


def _equal_chunk(layout: Layout) -> int | None:
    """The one size of the arena's chunks on a CPU; None if they have several."""
    if layout.device == "cpu" and layout.has_pool and layout.budget_bytes is not None:
        return pool_chunk_bytes(layout.budget_bytes)
    return None
