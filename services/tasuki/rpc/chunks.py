"""How samples and their scores are cut into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from tasuki.wire.channel import MAX_CHUNK_BYTES

_Part = TypeVar("_Part", bound=Message)


def chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Runs that fit a message; a single part always does, since so did the request that it came with. None for no parts."""
    chunk: list[_Part] = []
    chunk_bytes = 0
    for part in parts:
        part_bytes = part.ByteSize()
        if chunk and chunk_bytes + part_bytes > MAX_CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(part)
        chunk_bytes += part_bytes
    if chunk:
        yield chunk
