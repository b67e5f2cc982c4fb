"""All engine ranks as one, and their memory: a command goes through SGLang or straight to the ranks; each rank answers on its line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tasuki.rpc.memory import joined
from tasuki.rpc.ranks import RankFront
from tasuki.v1 import memory_pb2, ranks_pb2
from tasuki.wire.errors import Busy, InternalError, OutOfGpuMemory, TasukiError, from_reason
from tasuki.wire.stages import MemoryTag

_IDLE_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.005
_STRAIGHT = ("receive", "pause", "resume", "get_usage")
"""Commands that need not come between the same two batches of all ranks: they are refused while requests run, or only read."""


class CommandedEngine(Protocol):
    """Carries commands to the ranks."""

    @property
    def num_ranks(self) -> int: ...

    async def run_on_ranks(self, command: bytes) -> None:
        """Runs the command on every rank. Returns when all are done."""
        ...


class RankCalls(RankFront[ranks_pb2.EngineRankCommand, ranks_pb2.EngineRankResult]):
    """Calls the ranks of all replicas. The first command, sent through SGLang, tells them where to answer.

    Their memory is awake when the engine has started. Pause and resume are idempotent and all-or-nothing.

    Every call raises DeadlineExceeded when not all ranks have answered in time. A call that was given up goes on in the ranks: the
    next one waits for its end.
    """

    def __init__(self, engine: CommandedEngine, *, socket_dir: Path, staying: frozenset[MemoryTag] = frozenset()) -> None:
        """staying: tags that the ranks do not release."""
        self._engine, self._staying = engine, staying
        self._awake = {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
        self._running: asyncio.Future[None] | None = None
        path = socket_dir / "rollout-ranks.sock"
        super().__init__(path, ranks_pb2.EngineRankResult, service="engine", num_ranks=engine.num_ranks)

    @property
    def resident_tags(self) -> list[MemoryTag]:
        """Tags that are mapped on every rank."""
        return [tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in self._awake]

    async def call(
        self, command: ranks_pb2.EngineRankCommand | Sequence[ranks_pb2.EngineRankCommand], *, timeout_s: float | None = None
    ) -> list[ranks_pb2.EngineRankResult]:
        """Runs one command, the same in every rank.

        Once the ranks are connected, those in `_STRAIGHT` go directly to them: SGLang's own way takes longer than a command that moves
        nothing. All others run between the same two batches on every rank.
        """
        assert isinstance(command, ranks_pb2.EngineRankCommand)
        commands = [command] * self.num_ranks
        async with self._calling(commands, timeout_s=timeout_s) as results:
            if self._running is not None:
                await asyncio.wait([self._running])
            command.reply_address = self.address
            if command.WhichOneof("command") in _STRAIGHT and self.is_connected:
                await self._send(commands)
            else:
                self._running = asyncio.ensure_future(self._engine.run_on_ranks(command.SerializeToString()))
                await asyncio.shield(self._running)
        return results

    async def receive(self, receive: ranks_pb2.ReceiveCommand, *, timeout_s: float) -> list[ranks_pb2.ReceiveResult]:
        """Copies the published weights on every rank. After any error the engine's weights are unknown.

        No request may be running.
        """
        results = await self.call(ranks_pb2.EngineRankCommand(receive=receive), timeout_s=timeout_s)
        return [result.receive for result in results]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Gives the pages of `tags` back, cached prefixes with them. Returns the bytes released over all ranks.

        Raises Busy when requests still run after 5 seconds.
        """
        command = ranks_pb2.EngineRankCommand(pause=memory_pb2.PauseRequest(tags=[tag.number for tag in tags]))
        patience = asyncio.get_running_loop().time() + min(timeout_s, _IDLE_TIMEOUT_S)
        while True:
            try:
                results = await self.call(command, timeout_s=timeout_s)
                break
            except Busy:
                # The scheduler may take a moment to notice that its last request has ended. The tags of some ranks may sleep by then.
                if asyncio.get_running_loop().time() > patience:
                    raise
                await asyncio.sleep(_IDLE_POLL_S)
        self._awake -= set(tags) - self._staying
        return sum(result.pause.released_bytes for result in results)

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Takes pages for `tags` at the same addresses, on all ranks. Returns the bytes mapped over all ranks.

        Raises OutOfGpuMemory when a rank has no room; then what slept before sleeps on every rank. After any other error the memory's
        state is unknown.
        """
        command = ranks_pb2.EngineRankCommand(resume=memory_pb2.ResumeRequest(tags=[tag.number for tag in tags]))
        try:
            results = await self.call(command, timeout_s=timeout_s)
        except OutOfGpuMemory:
            await self.pause([tag for tag in tags if tag not in self._awake], timeout_s=timeout_s)
            raise
        self._awake |= set(tags)
        return sum(result.resume.mapped_bytes for result in results)

    async def usage(self, request: memory_pb2.GetUsageRequest, *, timeout_s: float) -> memory_pb2.GetUsageResponse:
        """Memory usage as every rank reports it. Raises DeadlineExceeded when they are busy for longer."""
        command = ranks_pb2.EngineRankCommand(get_usage=request)
        return joined([result.get_usage for result in await self.call(command, timeout_s=timeout_s)])

    async def load(self, *, timeout_s: float) -> list[ranks_pb2.LoadResult]:
        """Load of every rank's scheduler."""
        command = ranks_pb2.EngineRankCommand(get_load=ranks_pb2.GetLoadCommand())
        return [result.get_load for result in await self.call(command, timeout_s=timeout_s)]

    async def _raise_errors(self, results: Sequence[ranks_pb2.EngineRankResult]) -> None:
        """Raises what a rank reported; a mere lack of memory, which has changed nothing, only when no rank has worse to say."""
        errors = [_error_of(result) for result in results if result.HasField("error")]
        for error in sorted(errors, key=lambda error: isinstance(error, OutOfGpuMemory)):
            raise error

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        super().close()


def _error_of(result: ranks_pb2.EngineRankResult) -> TasukiError:
    message = f"engine rank {result.rank}: {result.error.message}"
    if not result.error.reason:
        return InternalError(message)
    return from_reason(result.error.reason, message, {**result.error.metadata, "rank": str(result.rank)})
