"""The front's end of a call to every engine rank: sends a command through SGLang or straight to the ranks, collects their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from tasuki.memory.tags import MemoryTag
from tasuki.rollout.rank_line import line_identity
from tasuki.rpc.usage import TAG_VALUES
from tasuki.v1 import memory_pb2, ranks_pb2
from tasuki.wire.errors import DeadlineExceeded, InternalError, OutOfGpuMemory, TasukiError, from_reason

Results = Sequence[ranks_pb2.EngineRankResult]
"""One for each rank, in the order of ranks."""


class CommandedEngine(Protocol):
    """What carries commands to the ranks."""

    @property
    def num_ranks(self) -> int: ...

    async def run_on_ranks(self, command: bytes) -> None:
        """Has every rank run the command and returns when all are done."""
        ...


class RankCalls:
    """Calls, one at a time. Owns the socket on which ranks answer; `close` removes it."""

    def __init__(self, engine: CommandedEngine, *, socket_dir: Path) -> None:
        self._engine = engine
        self._path = socket_dir / "rollout-ranks.sock"
        self._path.unlink(missing_ok=True)
        self._context = zmq.asyncio.Context()
        self._line = self._context.socket(zmq.ROUTER)
        self._line.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._line.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)
        self._turn = asyncio.Lock()
        self._last: asyncio.Future[None] | None = None
        self._call = 0
        self._joined: set[int] = set()
        """Ranks that have answered before, and so are on the line."""

    async def receive(self, receive: ranks_pb2.ReceiveCommand, *, timeout_s: float) -> list[ranks_pb2.ReceiveResult]:
        """Every rank copies what was published. After any error the engine's weights are unknown.

        No request may run: but for the first call of all it goes straight to the ranks, at once, and does not wait for batches.
        """
        way = self._send_to_ranks if len(self._joined) == self._engine.num_ranks else self._engine.run_on_ranks
        results = await self._call_by(way, ranks_pb2.EngineRankCommand(receive=receive), name="sync", timeout_s=timeout_s)
        return [result.receive for result in _checked(results)]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.PauseResponse]:
        """Every rank gives the tags' pages back. Raises Busy while requests run; on some ranks the tags may then sleep already."""
        pause = memory_pb2.PauseRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self.call(ranks_pb2.EngineRankCommand(pause=pause), name="pause", timeout_s=timeout_s)
        return [result.pause for result in _checked(results)]

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.ResumeResponse]:
        """Every rank takes pages for the tags. After an error the tags of some ranks are awake."""
        resume = memory_pb2.ResumeRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self.call(ranks_pb2.EngineRankCommand(resume=resume), name="resume", timeout_s=timeout_s)
        return [result.resume for result in _checked(results)]

    async def usage(self, *, timeout_s: float) -> list[memory_pb2.GetUsageResponse]:
        """What every rank sees of its memory."""
        command = ranks_pb2.EngineRankCommand(get_usage=memory_pb2.GetUsageRequest())
        results = await self.call(command, name="usage", timeout_s=timeout_s)
        return [result.get_usage for result in _checked(results)]

    async def call(self, command: ranks_pb2.EngineRankCommand, *, name: str, timeout_s: float) -> Results:
        """Runs `command` on every rank between the same two batches; ranks' errors stay in their results. Raises DeadlineExceeded.

        A call that was given up goes on in the ranks: the next one waits for its end.
        """
        return await self._call_by(self._engine.run_on_ranks, command, name=name, timeout_s=timeout_s)

    async def _call_by(
        self, send: Callable[[bytes], Awaitable[None]], command: ranks_pb2.EngineRankCommand, *, name: str, timeout_s: float
    ) -> Results:
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                if self._last is not None:
                    await asyncio.wait([self._last])
                self._call += 1
                command.call, command.reply_address = self._call, f"ipc://{self._path}"
                self._last = asyncio.ensure_future(send(command.SerializeToString()))
                answers = asyncio.create_task(self._collect())
                try:
                    await asyncio.gather(asyncio.shield(self._last), answers)
                finally:
                    answers.cancel()
                return answers.result()
        except TimeoutError as error:
            raise DeadlineExceeded(f"not every engine rank answered within {timeout_s:g} s", stage=name) from error

    async def _send_to_ranks(self, command: bytes) -> None:
        for rank in range(self._engine.num_ranks):
            await self._line.send_multipart([line_identity(rank), command])

    def close(self) -> None:
        if self._last is not None:
            self._last.cancel()
        self._line.close(linger=0)
        self._context.term()
        self._path.unlink(missing_ok=True)

    async def _collect(self) -> Results:
        results: dict[int, ranks_pb2.EngineRankResult] = {}
        while len(results) < self._engine.num_ranks:
            _, answer = await self._line.recv_multipart()
            result = ranks_pb2.EngineRankResult.FromString(answer)
            self._joined.add(result.rank)
            # An answer to a call that timed out may still arrive.
            if result.call == self._call:
                results[result.rank] = result
        return [results[rank] for rank in sorted(results)]


def _checked(results: Results) -> Results:
    """Raises what a rank reported; a mere lack of memory, which has changed nothing, only when no rank has worse to say."""
    errors = [_error_of(result) for result in results if result.HasField("error")]
    for error in sorted(errors, key=lambda error: isinstance(error, OutOfGpuMemory)):
        raise error
    return results


def _error_of(result: ranks_pb2.EngineRankResult) -> TasukiError:
    message = f"engine rank {result.rank}: {result.error.message}"
    if not result.error.reason:
        return InternalError(message)
    return from_reason(result.error.reason, message, {**result.error.metadata, "rank": str(result.rank)})
