"""Calls to every engine rank: commands go through SGLang or directly to the ranks, and each rank answers on its own line."""

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
    """Carries commands to the ranks."""

    @property
    def num_ranks(self) -> int: ...

    async def run_on_ranks(self, command: bytes) -> None:
        """Runs the command on every rank. Returns when all are done."""
        ...


class RankCalls(RankFront[ranks_pb2.EngineRankCommand, ranks_pb2.EngineRankResult]):
    """Calls the ranks of all replicas. The first command, sent through SGLang, tells them where to answer.

    Every call raises DeadlineExceeded if not all ranks answer in time. An abandoned call continues on the ranks; the next one waits for
    its end.
    """

    def __init__(self, engine: CommandedEngine, *, socket_dir: Path) -> None:
        self._engine = engine
        self._running: asyncio.Future[None] | None = None
        path = socket_dir / "rollout-ranks.sock"
        super().__init__(path, ranks_pb2.EngineRankResult, service="engine", num_ranks=engine.num_ranks)

    async def receive(self, receive: ranks_pb2.ReceiveCommand, *, timeout_s: float) -> list[ranks_pb2.ReceiveResult]:
        """Copies the published weights on every rank. After any error the engine's weights are unknown.

        No request may be running. All but the very first call go directly to the ranks and do not wait for batches.
        """
        results = await self._run(ranks_pb2.EngineRankCommand(receive=receive), name="sync", timeout_s=timeout_s)
        return [result.receive for result in results]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.PauseResponse]:
        """Releases the tags' pages on every rank. Raises Busy while requests run; some ranks may then already have paused."""
        pause = memory_pb2.PauseRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self._run(ranks_pb2.EngineRankCommand(pause=pause), name="pause", timeout_s=timeout_s)
        return [result.pause for result in results]

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> list[memory_pb2.ResumeResponse]:
        """Maps pages for the tags on every rank. After an error the tags are resident on some ranks."""
        resume = memory_pb2.ResumeRequest(tags=[TAG_VALUES[tag] for tag in tags])
        results = await self._run(ranks_pb2.EngineRankCommand(resume=resume), name="resume", timeout_s=timeout_s)
        return [result.resume for result in results]

    async def grow_cache(self, *, timeout_s: float) -> list[ranks_pb2.CacheResult]:
        """Maps and serves on every rank the KV cache that its requests may need, while there is room."""
        command = ranks_pb2.EngineRankCommand(grow_cache=ranks_pb2.GrowCacheCommand())
        return [result.grow_cache for result in await self._run(command, name="grow_cache", timeout_s=timeout_s)]

    async def shrink_cache(self, *, timeout_s: float) -> list[ranks_pb2.CacheResult]:
        """Releases on every rank the KV cache that its requests can no longer need, along with cached prefixes."""
        command = ranks_pb2.EngineRankCommand(shrink_cache=ranks_pb2.ShrinkCacheCommand())
        return [result.shrink_cache for result in await self._run(command, name="shrink_cache", timeout_s=timeout_s)]

    async def usage(self, *, timeout_s: float) -> list[memory_pb2.GetUsageResponse]:
        """Memory usage seen by every rank."""
        command = ranks_pb2.EngineRankCommand(get_usage=memory_pb2.GetUsageRequest())
        return [result.get_usage for result in await self._run(command, name="usage", timeout_s=timeout_s)]

    async def load(self, *, timeout_s: float) -> list[ranks_pb2.LoadResult]:
        """Load of every rank's scheduler."""
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
        """Sends a sync directly to the ranks once they are connected; anything else between the same two batches on all ranks."""
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
    """Raises the error that a rank reported; a mere lack of memory, which changed nothing, only if no rank has a worse one."""
    errors = [_error_of(result) for result in results if result.HasField("error")]
    for error in sorted(errors, key=lambda error: isinstance(error, OutOfGpuMemory)):
        raise error
    return results


def _error_of(result: ranks_pb2.EngineRankResult) -> TasukiError:
    message = f"engine rank {result.rank}: {result.error.message}"
    if not result.error.reason:
        return InternalError(message)
    return from_reason(result.error.reason, message, {**result.error.metadata, "rank": str(result.rank)})
