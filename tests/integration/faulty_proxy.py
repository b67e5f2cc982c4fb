"""A proxy between two unix sockets that breaks connections on request."""

import asyncio
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

HOLD_S = 0.02


class Break(StrEnum):
    """Fault for the next bytes that a client sends."""

    LOST_BEFORE = "they are thrown away, and the connection is reset"
    LOST_AFTER = "they arrive; what is answered is thrown away, and then the connection is reset"
    DELAY = "they arrive later"
    RESET = "they arrive, and the connection is reset at once"


class FaultyProxy:
    """Forwards bytes between clients of one socket and the server of another. armed: the next fault, which happens once."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.armed: Break | None = None

    async def start(self, path: Path) -> None:
        self._listener = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream_reader, upstream = await asyncio.open_unix_connection(self._server)
        is_mute = asyncio.Event()
        answers = asyncio.create_task(_pump(upstream_reader, writer, is_mute))
        try:
            while content := await reader.read(65536):
                broken, self.armed = self.armed, None
                if broken is Break.LOST_BEFORE:
                    return
                if broken is Break.LOST_AFTER:
                    is_mute.set()
                if broken is Break.DELAY:
                    await asyncio.sleep(HOLD_S)
                upstream.write(content)
                await upstream.drain()
                if broken is Break.LOST_AFTER:
                    await asyncio.sleep(HOLD_S)
                if broken in (Break.LOST_AFTER, Break.RESET):
                    return
        except ConnectionError:
            pass  # one of the two ends is closed
        finally:
            answers.cancel()
            for end in (writer, upstream):
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_mute: asyncio.Event) -> None:
    with suppress(ConnectionError):
        while content := await reader.read(65536):
            if not is_mute.is_set():
                writer.write(content)
                await writer.drain()
