"""Physical bytes of a tag: its tensors in the chunks of an arena."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.memory.granularity import arena_bytes, export_bytes
from tasuki.planner.layout import Layout


def tag_bytes(layout: Layout, tensors: Sequence[int]) -> int:
    """Bytes after tensors of these sizes were made in this order."""
    return arena_bytes(tuple(tensors), device=layout.device)


def published_bytes(layout: Layout, num_bytes: int) -> int:
    """Bytes for published copies, which lie in one block."""
    return export_bytes(num_bytes, device=layout.device)
