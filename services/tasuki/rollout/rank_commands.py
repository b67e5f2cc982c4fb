"""Runs in every engine rank: executes the front's commands while its scheduler waits for requests, and answers over ZMQ."""

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
from tasuki.memory.arena import NativeAllocator
from tasuki.memory.device_usage import device_usage
from tasuki.rollout.rank_memory import RankMemory
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.record import EngineModel
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.memory import usage_response
from tasuki.rpc.ranks import CommandRunner, Handlers, RankServer
from tasuki.v1 import memory_pb2, ranks_pb2, types_pb2
from tasuki.v1.ranks_pb2 import EngineRankCommand, EngineRankResult
from tasuki.weights.shared_base import SharedBase
from tasuki.weights.verify import HeldSlice
from tasuki.wire.errors import Busy
from tasuki.wire.stages import MemoryTag

if TYPE_CHECKING:
    from tasuki.rollout.sglang.scheduler import RankScheduler

_log = logging.getLogger("tasuki.rollout")
# If nobody takes a result, the front is gone and this process will end too.
_LINGER_MS = 5000


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
