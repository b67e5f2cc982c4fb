"""Calls to every engine rank: a command goes through SGLang or straight to the ranks, and each rank answers on its line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tasuki.memory.tags import MemoryTag
from tasuki.rpc.rank_front import RankFront
from tasuki.rpc.usage import TAG_VALUES
from tasuki.v1 import memory_pb2, ranks_pb2
from tasuki.wire.errors import DeadlineExceeded, InternalError, OutOfGpuMemory, TasukiError, from_reason


class CommandedEngine(Protocol):
    """What carries commands to the ranks."""

    @property
    def num_ranks(self) -> int: ...

    async def run_on_ranks(self, command: bytes) -> None:
        """Has every rank run the command and returns when all are done."""
        ...


class RankCalls(RankFront[ranks_pb2.EngineRankCommand, ranks_pb2.EngineRankResult]):
    """Calls the ranks of all replicas. They learn where to answer by the first command, which comes through SGLang.

    Every call raises DeadlineExceeded when not all ranks have answered in time. A call that was given up goes on in the ranks: the
    next one waits for its end.
    """

    def __init__(self, engine: CommandedEngine, *, socket_dir: Path) -> None:
        self._engine = engine
        self._running: asyncio.Future[None] | None = None
        path = socket_dir / "rollout-ranks.sock"
        super().__init__(path, ranks_pb2.EngineRankResult, service="engine", num_ranks=engine.num_ranks)

    async def receive(self, receive: ranks_pb2.ReceiveCommand, *, timeout_s: float) -> list[ranks_pb2.ReceiveResult]:
        """Every rank copies what was published. After any error the engine's weights are unknown.

        No request may run: but for the first call of all it goes straight to the ranks, at once, and does not wait for batches.
        """
        results = await self._run(ranks_pb2.EngineRankCommand(receive=receive), name="sync", timeout_s=timeout_s)
        return [result.receive for result in results]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.PauseResponse]:
        """Every rank gives the tags' pages back. Raises Busy while requests run; on some ranks the tags may then sleep already."""
        pause = memory_pb2.PauseRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self._run(ranks_pb2.EngineRankCommand(pause=pause), name="pause", timeout_s=timeout_s)
        return [result.pause for result in results]

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.ResumeResponse]:
        """Every rank takes pages for the tags. After an error the tags of some ranks are awake."""
        resume = memory_pb2.ResumeRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self._run(ranks_pb2.EngineRankCommand(resume=resume), name="resume", timeout_s=timeout_s)
        return [result.resume for result in results]

    async def grow_cache(self, *, timeout_s: float) -> list[ranks_pb2.CacheResult]:
        """Every rank maps the KV cache that its requests may need, as far as there is room, and serves it."""
        command = ranks_pb2.EngineRankCommand(grow_cache=ranks_pb2.GrowCacheCommand())
        return [result.grow_cache for result in await self._run(command, name="grow_cache", timeout_s=timeout_s)]

    async def shrink_cache(self, *, timeout_s: float) -> list[ranks_pb2.CacheResult]:
        """Every rank gives back the KV cache that its requests cannot need any more, and cached prefixes with it."""
        command = ranks_pb2.EngineRankCommand(shrink_cache=ranks_pb2.ShrinkCacheCommand())
        return [result.shrink_cache for result in await self._run(command, name="shrink_cache", timeout_s=timeout_s)]

    async def usage(self, *, timeout_s: float) -> list[memory_pb2.GetUsageResponse]:
        """What every rank sees of its memory."""
        command = ranks_pb2.EngineRankCommand(get_usage=memory_pb2.GetUsageRequest())
        return [result.get_usage for result in await self._run(command, name="usage", timeout_s=timeout_s)]

    async def load(self, *, timeout_s: float) -> list[ranks_pb2.LoadResult]:
        """What every rank's scheduler has to do."""
        command = ranks_pb2.EngineRankCommand(get_load=ranks_pb2.GetLoadCommand())
        return [result.get_load for result in await self._run(command, name="load", timeout_s=timeout_s)]

    async def _run(
        self, command: ranks_pb2.EngineRankCommand, *, name: str, timeout_s: float
    ) -> Sequence[ranks_pb2.EngineRankResult]:
        command.reply_address = self.address
        try:
            async with asyncio.timeout(timeout_s):
                return _checked(await self.gather(command))
        except TimeoutError as error:
            raise DeadlineExceeded(f"not every engine rank answered within {timeout_s:g} s", stage=name) from error

    async def _deliver(self, commands: Sequence[ranks_pb2.EngineRankCommand]) -> None:
        """A sync goes straight to the ranks, as soon as they have connected; anything else between the same two batches of all."""
        if self._running is not None:
            await asyncio.wait([self._running])
        command = commands[0]
        if command.HasField("receive") and self.is_connected:
            await super()._deliver(commands)
        else:
            self._running = asyncio.ensure_future(self._engine.run_on_ranks(command.SerializeToString()))
            await asyncio.shield(self._running)

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        super().close()


def _checked(results: Sequence[ranks_pb2.EngineRankResult]) -> Sequence[ranks_pb2.EngineRankResult]:
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
