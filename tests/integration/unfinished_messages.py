"""A caller that begins many messages of the largest size and ends none of them, over HTTP/2 without a library."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tasuki.wire.channel import MAX_MESSAGE_BYTES

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
ACK, ENDS_STREAM, ENDS_HEADERS = 1, 1, 4
INITIAL_WINDOW, MAX_STREAMS = 4, 3
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str) -> bytes:
    named = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path.encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"grpc-timeout": b"600S",
    }
    return b"".join(b"\x00%c%b%c%b" % (len(name), name, len(value), value) for name, value in named.items())


@dataclass(slots=True)
class UnfinishedCalls:
    """Calls on one connection. Sends what the server's windows allow, except the last byte of each message."""

    path: str
    num_calls: int
    writer: asyncio.StreamWriter
    ended: set[int] = field(default_factory=set)
    _left: dict[int, int] = field(default_factory=dict)
    _windows: dict[int, int] = field(default_factory=dict)
    _window: int = 65_535
    _initial: int = 65_535

    @property
    def held_bytes(self) -> int:
        """Sent in calls that the server has not ended."""
        return sum(MAX_MESSAGE_BYTES - 1 - left for left in self._left.values())

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the server closes the connection."""
        self.writer.write(_PREFACE + frame(SETTINGS, 0, 0))
        try:
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                self._receive(head[3], head[4], int.from_bytes(head[5:]), payload)
                for stream in list(self._left):
                    self._send(stream)
                await self.writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _receive(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._apply(dict(struct.iter_unpack(">HI", payload)))
        elif kind == PING and not flags & ACK:
            self.writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW and stream == 0:
            self._window += int.from_bytes(payload)
        elif kind == WINDOW and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload)
        elif kind == RESET or (kind == HEADERS and flags & ENDS_STREAM):
            self.ended.add(stream)
            self._left.pop(stream, None)

    def _apply(self, settings: dict[int, int]) -> None:
        change = settings.get(INITIAL_WINDOW, self._initial) - self._initial
        self._initial += change
        self._windows = {stream: window + change for stream, window in self._windows.items()}
        self.writer.write(frame(SETTINGS, ACK, 0))
        if not self._windows:
            for stream in range(1, 2 * min(self.num_calls, settings.get(MAX_STREAMS, self.num_calls)), 2):
                message = b"\0" + struct.pack(">I", MAX_MESSAGE_BYTES)
                self.writer.write(frame(HEADERS, ENDS_HEADERS, stream, headers(self.path)) + frame(DATA, 0, stream, message))
                self._windows[stream], self._left[stream] = self._initial - len(message), MAX_MESSAGE_BYTES - 1
                self._window -= len(message)

    def _send(self, stream: int) -> None:
        while (size := min(_FRAME_BYTES, self._window, self._windows[stream], self._left[stream])) > 0:
            self.writer.write(frame(DATA, 0, stream, bytes(size)))
            self._window, self._windows[stream] = self._window - size, self._windows[stream] - size
            self._left[stream] -= size


@asynccontextmanager
async def unfinished_calls(
    port: int, path: str, *, num_connections: int, num_calls: int
) -> AsyncIterator[list[UnfinishedCalls]]:
    """Hangs up at the end."""
    callers, tasks = list[UnfinishedCalls](), list[asyncio.Task[None]]()
    try:
        for _ in range(num_connections):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            callers.append(UnfinishedCalls(path, num_calls, writer))
            tasks.append(asyncio.create_task(callers[-1].run(reader)))
        yield callers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for caller in callers:
            caller.writer.transport.abort()


async def until_steady(value: Callable[[], int], *, for_s: float, limit_s: float) -> int:
    """The value once it has not changed for a while."""
    seen, since = value(), 0.0
    async with asyncio.timeout(limit_s):
        while since < for_s:
            await asyncio.sleep(0.1)
            since = since + 0.1 if value() == seen else 0.0
            seen = value()
    return seen
