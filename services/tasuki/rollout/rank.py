"""One engine rank: executes the front's commands while its scheduler waits for requests, and answers over ZMQ; its memory."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from tasuki.config import paths
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import ArenaState, NativeAllocator
from tasuki.memory.device_usage import device_usage
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.record import EngineModel
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.memory import usage_response
from tasuki.rpc.ranks import CommandRunner, Handlers, RankServer
from tasuki.v1 import memory_pb2, ranks_pb2, types_pb2
from tasuki.v1.ranks_pb2 import EngineRankCommand, EngineRankResult
from tasuki.v1.types_pb2 import TagUsage
from tasuki.weights.chunk_memory import storage_at
from tasuki.weights.imported_weights import HeldSlice
from tasuki.weights.shared_base import SharedBase
from tasuki.wire.errors import Busy
from tasuki.wire.stages import MemoryTag

if TYPE_CHECKING:
    from tasuki.rollout.sglang.scheduler import RankScheduler

_log = logging.getLogger("tasuki.rollout")
# If nobody takes a result, the front is gone and this process will end too.
_LINGER_MS = 5000
# Beside the cache itself SGLang keeps tables of its layers' addresses in the same region.
_MAX_CACHE_TABLE_BYTES = 64 * 1024
# What is used only while tokens are generated sleeps together.
_TOGETHER = {MemoryTag.KV_CACHE: (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)}
Span = tuple[int, int]
"""Address and bytes."""


class KeptContent:
    """A host copy of spans of device memory, over a pause. On a GPU it is pinned, taken once and reused."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host = torch.empty(0, dtype=torch.uint8)

    @property
    def host_bytes(self) -> int:
        return self._host.numel()

    def save(self, spans: Sequence[Span], *, device: str) -> None:
        """Starts the copies; they are done when the device is idle, which a pause waits for before it takes pages."""
        total_bytes = sum(num_bytes for _, num_bytes in spans)
        if self._host.numel() != total_bytes:
            self._host = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        copies = self._host.split([num_bytes for _, num_bytes in spans])
        self._pieces = [(memory_at(span, device=device), copy) for span, copy in zip(spans, copies, strict=True)]
        for memory, copy in self._pieces:
            copy.copy_(memory, non_blocking=True)

    def restore(self) -> None:
        for memory, copy in self._pieces:
            memory.copy_(copy, non_blocking=True)


def without(blocks: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The parts of `blocks` that lie in none of `holes`, in the order of their addresses."""
    left: list[Span] = []
    ends = sorted((start, start + num_bytes) for start, num_bytes in holes)
    for start, num_bytes in sorted(blocks):
        at, end = start, start + num_bytes
        for hole_start, hole_end in ends:
            if hole_end <= at:
                continue
            if hole_start >= end:
                break
            if hole_start > at:
                left.append((at, hole_start - at))
            at = hole_end
        if at < end:
            left.append((at, end - at))
    return left


def memory_at(span: Span, *, device: str) -> torch.Tensor:
    """The bytes at an address as a tensor that does not own them."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage_at(*span, device=torch.device(device)))


def span_of(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def rank_allocator(device: str) -> NativeAllocator:
    """Arenas for what an engine rank holds; nothing is kept by the arenas themselves. device: "cpu" or "cuda:<number>"."""
    tags = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
    # On a CPU nothing is captured.
    return NativeAllocator(tags=tags if device == "cpu" else [*tags, MemoryTag.CUDA_GRAPH], device=device)


class RankMemory:
    """Pauses and resumes a rank's tags. Parameters come back by a sync, the KV cache empty, and everything else as it was.

    scheduler: None for a model without an engine. Its map from requests to cache slots must never hold slots that do not exist.
    staying: tags that never sleep, whatever is asked.
    base: holds the parameters where the trainer reads them too; counted here alone.
    """

    def __init__(
        self,
        allocator: NativeAllocator,
        model: EngineModel,
        *,
        scheduler: "RankScheduler | None" = None,
        staying: frozenset[MemoryTag] = frozenset(),
        base: SharedBase | None = None,
    ) -> None:
        self._base_bytes = 0 if base is None else base.num_bytes
        self._allocator, self._model, self._scheduler, self._staying = allocator, model, scheduler, staying
        # New memory of a host is zeros; that of a GPU holds what was there before.
        self._is_zeroed = allocator.device == "cpu"
        self._kept = {tag: KeptContent() for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)}
        self._found: dict[MemoryTag, tuple[tuple[int, int], list[Span]]] = {}

    def pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        """Evicts every cached prefix and gives the pages of the tags back.

        Raises Busy while a request runs, and until the scheduler has noticed that the last one ended.
        """
        if self._scheduler is not None and not self._scheduler.flush():
            raise Busy("requests run", num_running=self._scheduler.num_running)
        tags = self._all_of(request.tags)
        for tag in tags:
            if tag in self._kept and not self._is_paused(tag):
                self._kept[tag].save(self._spans_to_keep(tag), device=self._allocator.device)
        return memory_pb2.PauseResponse(released_bytes=self._allocator.pause(tags))

    def resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        """Takes pages at the same addresses. Raises OutOfGpuMemory with every tag still asleep."""
        tags = self._all_of(request.tags)
        woken = [tag for tag in tags if self._is_paused(tag)]
        mapped = self._allocator.resume(tags)
        for tag in woken:
            if tag in self._kept:
                self._kept[tag].restore()
        if MemoryTag.KV_CACHE in woken and self._scheduler is not None and not self._is_zeroed:
            self._scheduler.forget_slots()
        if woken and self._allocator.device != "cpu":
            torch.cuda.synchronize(self._allocator.device)
        return memory_pb2.ResumeResponse(mapped_bytes=mapped)

    def usage(self) -> list[TagUsage]:
        usages = self._allocator.usage()
        for usage in usages:
            tag = MemoryTag.known(usage.tag)
            usage.mapped_bytes += self._outside(tag)
            usage.total_bytes += self._outside(tag)
            usage.host_copy_bytes += self._kept[tag].host_bytes if tag in self._kept else 0
            usage.stays = tag in self._staying
        return usages

    def _outside(self, tag: MemoryTag) -> int:
        """Bytes of a tag that are in no arena."""
        return self._base_bytes if tag is MemoryTag.WEIGHTS else 0

    def _all_of(self, named: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
        tags = MemoryTag.all_of(named)
        wanted = [each for tag in tags for each in _TOGETHER.get(tag, (tag,))]
        return [tag for tag in wanted if (tag in self._allocator.tags or tag in tags) and tag not in self._staying]

    def _is_paused(self, tag: MemoryTag) -> bool:
        return self._allocator.arena(tag).usage().state is ArenaState.PAUSED

    def _spans_to_keep(self, tag: MemoryTag) -> list[Span]:
        """Looked for again only when something was freed: nothing is made in a region once the engine is built."""
        usage = self._allocator.arena(tag).usage()
        seen = (usage.num_blocks, usage.used_bytes)
        if tag not in self._found or self._found[tag][0] != seen:
            self._found[tag] = seen, self._find_spans_to_keep(tag)
        return self._found[tag][1]

    def _find_spans_to_keep(self, tag: MemoryTag) -> list[Span]:
        blocks = self._allocator.blocks(tag)
        if tag is MemoryTag.KV_CACHE:
            return [span for span in blocks if span[1] <= _MAX_CACHE_TABLE_BYTES]
        return without(blocks, [span_of(parameter.data) for _, parameter in self._model.named_parameters()])


if TYPE_CHECKING:
    from tasuki.rollout.sglang.scheduler import RankScheduler


def rank_address(socket_dir: Path) -> Path:
    """The front's socket, to which the ranks connect."""
    return socket_dir / "rollout-ranks.sock"


class RankLine:
    """Owns the rank's socket and the thread that reads commands, until `close`.

    run: executes a command from the front, in this thread.
    """

    def __init__(self, path: Path, *, rank: int, run: Callable[[EngineRankCommand], EngineRankResult]) -> None:
        self._socket = RankServer(f"ipc://{path}", rank=rank, linger_ms=_LINGER_MS)
        self._socket.send(EngineRankResult(rank=rank))  # lets the front send
        self._closed = os.eventfd(0)
        self._thread = threading.Thread(target=self._answer, args=(run,), name="front-line", daemon=True)
        self._thread.start()

    def _answer(self, run: Callable[[EngineRankCommand], EngineRankResult]) -> None:
        """Ends the process where it fails, so that the front sees the rank's end instead of waiting for an answer."""
        try:
            for command in self._socket.commands(EngineRankCommand, until=[self._closed]):
                self._socket.send(run(command))
        except BaseException:  # noqa: BLE001  whatever it is, nobody else reads commands
            _log.exception("event=rank_line_failed")
            os._exit(1)

    def close(self) -> None:
        os.eventfd_write(self._closed, 1)
        self._thread.join()
        self._socket.close()
        os.close(self._closed)


class EngineRank:
    """Command handler of one engine rank.

    rank: index among all engine ranks, which names the process. scheduler: None for a model without an engine.
    lock: the scheduler's, which it releases while it waits.
    adapter: what is received in the place of the model, which then stays as it was loaded. staying: tags that never sleep. base:
    holds the model where the trainer reads it too.
    """

    def __init__(
        self,
        model: EngineModel,
        allocator: NativeAllocator,
        *,
        rank: int,
        scheduler: "RankScheduler | None" = None,
        lock: "EngineLock | None" = None,
        adapter: EngineModel | None = None,
        staying: frozenset[MemoryTag] = frozenset(),
        base: SharedBase | None = None,
    ) -> None:
        self.rank = rank
        self._lock = EngineLock() if lock is None else lock
        self._layout: tuple[Sequence[HeldSlice], bytes] = (), b""
        self.receiver = WeightReceiver(model if adapter is None else adapter)
        self._allocator, self._scheduler = allocator, scheduler
        self.memory = RankMemory(allocator, model, scheduler=scheduler, staying=staying, base=base)
        handlers: Handlers = {
            "receive": self._receive,
            "pause": self.memory.pause,
            "resume": self.memory.resume,
            "get_usage": self._usage,
            "get_load": self._load,
        }
        self.commands = CommandRunner(ranks_pb2.EngineRankResult, handlers, rank)

    def join_node(self, config: NodeConfig) -> None:
        """Starts the heartbeat that the node's supervisor watches, and takes commands."""
        name = f"scheduler{self.rank}"
        self.commands.failpoints = self.receiver.failpoints = Failpoints.of(config, name)
        self.commands.heartbeat = Heartbeat(config.state_dir, name)
        self.commands.heartbeat.beat_in_thread()
        self.serve(paths.socket_dir(config.state_dir))

    def serve(self, socket_dir: Path) -> RankLine:
        """Takes commands of the front whose socket is in this folder."""
        return RankLine(rank_address(socket_dir), rank=self.rank, run=self.run)

    def run(self, command: ranks_pb2.EngineRankCommand) -> ranks_pb2.EngineRankResult:
        """Runs a command in the thread of the line, once the scheduler waits for requests."""
        if self._allocator.device != "cpu":
            torch.cuda.set_device(self._allocator.device)
        with self._lock.held(), torch.no_grad(), self._stream_of(command):
            return self.commands.run(command)

    def _stream_of(self, command: ranks_pb2.EngineRankCommand) -> AbstractContextManager[Any]:
        """The scheduler's stream, since a pause makes tensors that the scheduler uses. A sync waits for its own work."""
        if self._scheduler is None or self._allocator.device == "cpu" or command.HasField("receive"):
            return nullcontext()
        return self._scheduler.stream()

    def _receive(self, command: ranks_pb2.ReceiveCommand) -> ranks_pb2.ReceiveResult:
        if self._scheduler is not None and not self._scheduler.is_idle():
            raise Busy("requests run", num_running=self._scheduler.num_running)
        timeout_s = command.import_timeout_ms / 1000
        received = self.receiver.receive(command.weights, import_timeout_s=timeout_s)
        if self._layout[0] is not received.held:
            self._layout = received.held, hashlib.sha256(repr(received.held).encode()).digest()
        result = ranks_pb2.ReceiveResult(
            policy_version=command.weights.policy_version,
            copied_bytes=received.copied_bytes,
            fallback_names=received.fallback_names,
            timings=[types_pb2.Timing(name=name, seconds=seconds) for name, seconds in received.timings.items()],
            layout_digest=self._layout[1],
        )
        if result.layout_digest in command.known_layouts:
            result.sums = received.sums.astype("<u8").tobytes()
        else:
            result.checksums.extend(
                ranks_pb2.PieceChecksum(name=name, offset=at.offset, shape=at.shape, strides=at.strides, checksum=value)
                for name, at, value in received.checksums
            )
        return result

    def _usage(self, request: memory_pb2.GetUsageRequest) -> memory_pb2.GetUsageResponse:
        device = device_usage(self._allocator.device, self.rank, skip_torch_cache=request.skip_torch_cache)
        return usage_response(self.memory.usage(), device)

    def _load(self, _: ranks_pb2.GetLoadCommand) -> ranks_pb2.LoadResult:
        return ranks_pb2.LoadResult() if self._scheduler is None else self._scheduler.load()


class EngineLock:
    """Held by the scheduler, except while it waits for requests; then available to a command from the front.

    Fair: a waiting thread gets it next, although a busy scheduler releases it for only microseconds.
    """

    def __init__(self) -> None:
        self._held, self._next = Lock(), Lock()

    def acquire(self) -> None:
        with self._next:
            self._held.acquire()

    def release(self) -> None:
        self._held.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Releases the lock for the block; called by its holder."""
        self.release()
        try:
            yield
        finally:
            self.acquire()
