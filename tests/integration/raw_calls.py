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


async def code_of_stream(
    channel: grpc.aio.Channel, path: str, messages: Sequence[bytes], *, timeout_s: float = 5.0
) -> grpc.StatusCode:
    """The code of a call with several messages; OK as soon as an answer comes."""

    async def sent():
        for message in messages:
            yield message

    call = channel.stream_stream(path)(sent(), timeout=timeout_s)
    try:
        async for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        # A write to a call that the server has ended: what it ended with is lost in grpcio.
        is_lost = error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
        return grpc.StatusCode.CANCELLED if is_lost else error.code()
    return await call.code()
