"""Parts of a call: messages that fit a stream, and the time left."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from tasuki.wire.channel import MAX_CHUNK_BYTES

_Part = TypeVar("_Part", bound=Message)


def chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yields runs of parts that fit a message; nothing for no parts. A single part always fits, as it did in its request."""
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


_NO_DEADLINE_S = 600.0
"""Deadline of a read whose caller sets none; a mutating call without one is refused."""


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Seconds until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining
