"""Runs in every engine rank: carries out what the service's front asks, and answers over ZMQ.

SGLang calls `run_command` as a custom weight loader, between two batches and on every rank in the same order. The first command also
opens the rank's line to the front, on which a command comes straight to `EngineRank.run_at_once`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from tasuki.config.schema import NodeConfig
from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.device_usage import device_usage
from tasuki.memory.tags import MemoryTag
from tasuki.rollout.engine_lock import EngineLock
from tasuki.rollout.rank_line import RankLine
from tasuki.rollout.rank_memory import RankMemory
from tasuki.rollout.receive import Received, WeightReceiver
from tasuki.rollout.record import EngineModel
from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.rank_server import Handlers, answer_command
from tasuki.rpc.usage import TAGS, usage_response
from tasuki.transport.shared_base import SharedBase
from tasuki.transport.verify import HeldSlice
from tasuki.v1 import memory_pb2, ranks_pb2, types_pb2
from tasuki.wire.errors import Busy, InvalidArgument

if TYPE_CHECKING:
    from tasuki.rollout.growing_cache import GrowingCache

COMMAND_LOADER = "tasuki.rollout.rank_commands.run_command"
"""The name under which SGLang finds `run_command`."""


class EngineRank:
    """What one engine rank does when it is told to.

    rank: place among all engine ranks, which names the process. scheduler: SGLang's, or None for a model without an engine around it.
    lock: the scheduler's, which it releases while it waits.
    adapter: what is received in the place of the model, which then stays as it was loaded. staying: tags that never sleep. cache: the
    scheduler's KV cache where it grows. base: what the model lies in where the trainer reads it, too.
    """

    def __init__(
        self,
        model: EngineModel,
        allocator: NativeAllocator,
        *,
        rank: int,
        scheduler: Any = None,
        lock: EngineLock | None = None,
        adapter: EngineModel | None = None,
        staying: frozenset[MemoryTag] = frozenset(),
        cache: GrowingCache | None = None,
        base: SharedBase | None = None,
    ) -> None:
        self.rank = rank
        self._cache = cache
        self._lock = EngineLock() if lock is None else lock
        self._layout: tuple[Sequence[HeldSlice], bytes] = (), b""
        self.receiver = WeightReceiver(model if adapter is None else adapter)
        self._allocator, self._scheduler = allocator, scheduler
        self._heartbeat: Heartbeat | None = None
        self._failpoints = NO_FAILPOINTS
        slot_table = None if scheduler is None else scheduler.req_to_token_pool.req_to_token
        self.memory = RankMemory(allocator, model, slot_table=slot_table, staying=staying, cache=cache, base=base)
        self._handlers: Handlers = {
            "receive": self._receive,
            "pause": self._pause,
            "resume": self._resume,
            "get_usage": self._usage,
            "get_load": self._load,
            "grow_cache": self._grow_cache,
            "shrink_cache": self._shrink_cache,
        }

    def join_node(self, config: NodeConfig) -> None:
        """From here on the node's supervisor sees whether this process lives."""
        name = f"scheduler{self.rank}"
        self._failpoints = self.receiver.failpoints = Failpoints.of(config, name)
        self._heartbeat = Heartbeat(config.state_dir, name)
        self._heartbeat.beat_in_thread()

    def run(self, command: ranks_pb2.EngineRankCommand) -> ranks_pb2.EngineRankResult:
        """Errors travel in the result: an exception would end the scheduler and with it the whole engine."""
        result = ranks_pb2.EngineRankResult(call=command.call, rank=self.rank)
        with self._heartbeat.working() if self._heartbeat is not None else nullcontext():
            return answer_command(command, result, handlers=self._handlers, failpoints=self._failpoints)

    def run_at_once(self, command: bytes) -> ranks_pb2.EngineRankResult:
        """Runs a command that came straight from the front, in another thread than the scheduler's, as soon as that waits for requests."""
        if self._allocator.device != "cpu":
            torch.cuda.set_device(self._allocator.device)
        with self._lock.held(), torch.no_grad():
            return self.run(ranks_pb2.EngineRankCommand.FromString(command))

    def _receive(self, command: ranks_pb2.ReceiveCommand) -> ranks_pb2.ReceiveResult:
        if self._scheduler is not None and not self._scheduler.is_fully_idle():
            raise Busy("requests run", num_running=len(self._scheduler.running_batch.reqs))
        timeout_s = command.import_timeout_ms / 1000
        received = self.receiver.receive(command.weights, import_timeout_s=timeout_s, reads_back_in_full=command.full_read_back)
        if self._layout[0] is not received.held:
            self._layout = received.held, hashlib.sha256(repr(received.held).encode()).digest()
        result = _encode_received(command.weights.policy_version, received)
        result.layout_digest = self._layout[1]
        if result.layout_digest in command.known_layouts:
            result.sums = received.sums.astype("<u8").tobytes()
        else:
            result.checksums.extend(
                ranks_pb2.PieceChecksum(name=name, offset=at.offset, shape=at.shape, strides=at.strides, checksum=value)
                for name, at, value in received.checksums
            )
        return result

    def _pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        if self._scheduler is not None:
            self._release()
        return memory_pb2.PauseResponse(released_bytes=self.memory.pause([TAGS[tag] for tag in request.tags]))

    def _resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        return memory_pb2.ResumeResponse(mapped_bytes=self.memory.resume([TAGS[tag] for tag in request.tags]))

    def _release(self) -> None:
        """Forgets every cached prefix. Raises Busy while the scheduler has not yet noticed that its last request ended."""
        # SGLang would else collect garbage and give torch's cached blocks back, which takes longer than all the rest.
        if not self._scheduler.flush_cache(empty_cache=False):
            raise Busy("requests run", num_running=len(self._scheduler.running_batch.reqs))

    def _grow_cache(self, _: ranks_pb2.GrowCacheCommand) -> ranks_pb2.CacheResult:
        return self._cache_result(ranks_pb2.CacheResult(**asdict(self._growing().grow(self._reached))))

    def _shrink_cache(self, _: ranks_pb2.ShrinkCacheCommand) -> ranks_pb2.CacheResult:
        return self._cache_result(ranks_pb2.CacheResult(released_bytes=self._growing().shrink(self._reached)))

    def _reached(self, point: str) -> None:
        """A command has come further."""
        self._failpoints.hit(point)
        if self._heartbeat is not None:
            self._heartbeat.progressed()

    def _growing(self) -> GrowingCache:
        if self._cache is None:
            raise InvalidArgument("rollout.kv_growth", "is false: this engine's KV cache is mapped as a whole")
        return self._cache

    def _cache_result(self, moved: ranks_pb2.CacheResult) -> ranks_pb2.CacheResult:
        """The bytes that a command has moved, with what the cache is after it."""
        moved.MergeFrom(ranks_pb2.CacheResult(**asdict(self._growing().extent())))
        return moved

    def _usage(self, _: memory_pb2.GetUsageRequest) -> memory_pb2.GetUsageResponse:
        return usage_response(self.memory.usage(), device_usage(self._allocator.device, self.rank))

    def _load(self, _: ranks_pb2.GetLoadCommand) -> ranks_pb2.LoadResult:
        scheduler = self._scheduler
        if scheduler is None:
            return ranks_pb2.LoadResult()
        num_kv_tokens, _ratio = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        return ranks_pb2.LoadResult(
            num_running=len(scheduler.running_batch.reqs),
            num_queued=len(scheduler.waiting_queue),
            num_kv_tokens=max(0, num_kv_tokens),
            num_served_kv_tokens=scheduler.max_total_num_tokens if self._cache is None else self._cache.extent().served_tokens,
        )


# SGLang hands its loader the model and nothing to keep state in. One for each scheduler process.
_ranks: list[EngineRank] = []
_lines: list[RankLine] = []


def register_rank(rank: EngineRank) -> None:
    """The one that `run_command` asks from now on."""
    _ranks[:] = [rank]


def command_tensors(command: bytes) -> list[tuple[str, torch.Tensor]]:
    """A command as SGLang carries it: as the name of a tensor without elements, which needs neither shared memory nor a copy."""
    return [(command.decode("latin-1"), torch.empty(0, dtype=torch.uint8))]


def run_command(model: EngineModel, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: an EngineRankCommand in, see `command_tensors`, an EngineRankResult out on the rank's line."""
    ((content, _),) = named_tensors
    command = ranks_pb2.EngineRankCommand.FromString(content.encode("latin-1"))
    (rank,) = _ranks
    result = rank.run(command)
    _line_to(command.reply_address).send(result)


def _line_to(address: str) -> RankLine:
    if not _lines or _lines[0].address != address:
        for line in _lines:
            line.close()
        (rank,) = _ranks
        _lines[:] = [RankLine(address, rank=rank.rank, run=_run_at_once)]
    return _lines[0]


def _run_at_once(command: bytes) -> ranks_pb2.EngineRankResult:
    (rank,) = _ranks
    return rank.run_at_once(command)


def _encode_received(policy_version: int, received: Received) -> ranks_pb2.ReceiveResult:
    return ranks_pb2.ReceiveResult(
        policy_version=policy_version,
        copied_bytes=received.copied_bytes,
        fallback_names=received.fallback_names,
        timings=[types_pb2.Timing(name=name, seconds=seconds) for name, seconds in received.timings.items()],
    )
