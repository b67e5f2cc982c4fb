"""Calls of any method with arbitrary bytes, as an attacker makes them."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import grpc
import grpc.aio

Header = tuple[str, str]
NUM_AT_ONCE = 16


async def code_of(
    channel: grpc.aio.Channel, path: str, message: bytes = b"", *, metadata: Sequence[Header] = (), timeout_s: float = 5.0
) -> grpc.StatusCode:
    """Returns the status code of a call with one message, of any method kind; OK as soon as an answer comes."""
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
    """Returns the status code of a call with several messages; OK as soon as an answer comes."""

    async def sent():
        for message in messages:
            yield message

    call = channel.stream_stream(path)(sent(), timeout=timeout_s)
    try:
        async for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        # When a write meets a call that the server has ended, grpcio loses the call's status.
        is_lost = error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
        return grpc.StatusCode.CANCELLED if is_lost else error.code()
    return await call.code()


async def answers(channel: grpc.aio.Channel, calls: Iterator[tuple[str, list[bytes]]]) -> Counter[grpc.StatusCode]:
    """Makes calls, each a path with messages, and counts the status codes."""
    codes: Counter[grpc.StatusCode] = Counter()

    async def attack() -> None:
        for path, messages in calls:
            call = code_of(channel, path, messages[0]) if len(messages) == 1 else code_of_stream(channel, path, messages)
            codes[await call] += 1

    await asyncio.gather(*(attack() for _ in range(NUM_AT_ONCE)))
    return codes
