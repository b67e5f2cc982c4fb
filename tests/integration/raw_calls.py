"""Calls of any method with any bytes, as an attacker makes them."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

Header = tuple[str, str]


async def code_of(
    channel: grpc.aio.Channel, path: str, message: bytes = b"", *, metadata: Sequence[Header] = (), timeout_s: float = 5.0
) -> grpc.StatusCode:
    """The code of a call with one message, of whatever kind the method is; OK as soon as an answer comes, whatever follows."""
    call = channel.unary_stream(path)(message, metadata=tuple(metadata), timeout=timeout_s)
    try:
        async for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()
