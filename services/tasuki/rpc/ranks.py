"""A service's front and its ranks: one command to each rank, one result from each, over a private unix socket."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError, Message

from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.v1.ranks_pb2 import EngineRankCommand, EngineRankResult, RankError, TrainerRankCommand, TrainerRankResult
from tasuki.wire.errors import DeadlineExceeded, InternalError, PeerUnavailable, TasukiError, from_reason

_log = logging.getLogger("tasuki.rpc")
# A connected rank gets its last command within it, and leaves with the front otherwise.
_LINGER_MS = 200
_DEATH_NOTICE_S = 0.5
_END_MARGIN_S = 0.3


CommandT = TypeVar("CommandT", TrainerRankCommand, EngineRankCommand)
ResultT = TypeVar("ResultT", TrainerRankResult, EngineRankResult)


def rank_identity(rank: int) -> bytes:
    """The name under which a rank's socket connects."""
    return f"rank-{rank}".encode()


class RankFront(Generic[CommandT, ResultT]):
    """Calls the ranks, one call at a time. Owns the socket; `close` removes it.

    If a rank dies, or only some ranks fail in `call`, their states differ. The running call and all later ones then raise, and `broken`
    is set, so that the service is ended.
    """

    straggler_timeout_s: float | None = None
    """Seconds that the other ranks may take once one has failed; None for as long as the caller waits."""
    breaking: frozenset[str] = frozenset()
    """Reasons of errors after which the ranks' state is undefined, though all of them agree."""

    def __init__(self, path: Path, result: type[ResultT], *, service: str, num_ranks: int) -> None:
        """path: of the socket, in a private folder. service: names the ranks in errors."""
        self.address, self.num_ranks = f"ipc://{path}", num_ranks
        self.broken = asyncio.Event()
        self._path, self._result, self._service = path, result, service
        self._cause: TasukiError | None = None
        self._turn = asyncio.Lock()
        self._call = 0
        self._results: dict[int, ResultT] = {}
        self._arrived = asyncio.Event()
        self._connected: set[bytes] = set()
        self._pid_fds: list[int] = []
        path.unlink(missing_ok=True)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self.address)
        path.chmod(0o600)
        self._receiver = asyncio.get_running_loop().create_task(self._receive())
        self._receiver.add_done_callback(self._received)

    @property
    def is_connected(self) -> bool:
        """Whether every rank has connected, so commands can be sent to it."""
        return all(rank_identity(rank) in self._connected for rank in range(self.num_ranks))

    async def call(self, command: CommandT | Sequence[CommandT], *, timeout_s: float | None = None) -> list[ResultT]:
        """Runs one command in every rank; of a sequence, which has one kind, each command in its rank. Results in order of rank.

        Raises the error that the ranks agree on, and InternalError naming the rank for any other. Raises DeadlineExceeded when not all
        have answered within `timeout_s`; the ranks go on.
        """
        commands = [command] * self.num_ranks if isinstance(command, Message) else command
        async with self._calling(commands, timeout_s=timeout_s) as results:
            await self._send(commands)
        return results

    @asynccontextmanager
    async def _calling(self, commands: Sequence[CommandT], *, timeout_s: float | None) -> AsyncIterator[list[ResultT]]:
        """Awaits a call that the block sends to the ranks, fills in the results, and raises as `call` does."""
        results: list[ResultT] = []
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                if self._cause is not None:
                    raise self._cause
                self._call += 1
                self._results.clear()
                for each in commands:
                    each.call = self._call
                yield results
                results += await self._wait_for_results()
                await self._raise_errors(results)
        except TimeoutError as error:
            assert timeout_s is not None
            text = f"not every {self._service} rank answered within {timeout_s:g} s"
            raise DeadlineExceeded(text, stage=commands[0].WhichOneof("command") or "") from error

    def watch(self, rank: int, *, pid: int) -> None:
        """Watches a rank's process, and notices its end at once."""
        fd = os.pidfd_open(pid)
        self._pid_fds.append(fd)

        def gone() -> None:
            asyncio.get_running_loop().remove_reader(fd)
            text = f"{self._service} rank {rank} (pid {pid}) is gone; the {self._service} has to be started again"
            self._break(PeerUnavailable(text, rank=rank))

        asyncio.get_running_loop().add_reader(fd, gone)

    def close(self) -> None:
        """Idempotent."""
        self._receiver.cancel()
        while self._pid_fds:
            fd = self._pid_fds.pop()
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._socket.close(linger=_LINGER_MS)  # belongs to the event loop's thread
        _end_context(self._context, linger_ms=_LINGER_MS)
        self._path.unlink(missing_ok=True)

    async def _send(self, commands: Sequence[CommandT]) -> None:
        """Sends each rank its command."""
        for rank, command in enumerate(commands):
            try:
                await self._socket.send_multipart([rank_identity(rank), command.SerializeToString()])
            except zmq.ZMQError as error:
                self._break(PeerUnavailable(f"{self._service} rank {rank} cannot be reached: {error}", rank=rank))

    async def _wait_for_results(self) -> list[ResultT]:
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while len(self._results) < self.num_ranks and self._cause is None:
            self._arrived.clear()
            failed = [result for result in self._results.values() if result.HasField("error")]
            if deadline is None and failed and self.straggler_timeout_s is not None:
                deadline = loop.time() + self.straggler_timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                missing = sorted(set(range(self.num_ranks)) - self._results.keys())
                first = f"rank {failed[0].rank}: {failed[0].error.message}"
                self._break(InternalError(f"{self._service} ranks {missing} do not answer after another rank failed: {first}"))
        if self._cause is not None:
            raise self._cause
        return [self._results[rank] for rank in range(self.num_ranks)]

    async def _raise_errors(self, results: Sequence[ResultT]) -> None:
        """Raises the error that all ranks agree on; any other breaks the ranks. Overridden where ranks may fail by themselves."""
        failed = [result for result in results if result.HasField("error")]
        if not failed:
            return
        if not all(result.error.reason for result in failed):
            # A rank whose peer was killed mostly fails in their collective before the kernel tells us of the death.
            await asyncio.sleep(_DEATH_NOTICE_S)
            if self._cause is not None:
                raise self._cause
        first = failed[0]
        if len(failed) == len(results) and len({result.error.reason for result in failed}) == 1 and first.error.reason:
            agreed = from_reason(first.error.reason, first.error.message, dict(first.error.metadata))
            if agreed.reason in self.breaking:
                self._break(agreed)
            raise agreed
        error = InternalError(f"{self._service} rank {first.rank} failed: {first.error.message}", rank=first.rank)
        self._break(error)
        raise error

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                (payload,) = frames
                result = self._result.FromString(payload)
            except (ValueError, DecodeError):
                continue  # noise of another process of this user
            self._connected.add(identity)
            # A result of an abandoned call may still arrive.
            if result.call == self._call:
                self._results[result.rank] = result
                self._arrived.set()

    def _received(self, receiver: asyncio.Task[None]) -> None:
        if not receiver.cancelled():
            self._break(InternalError(f"the {self._service} ranks' socket failed: {receiver.exception()}"))

    def _break(self, cause: TasukiError) -> None:
        if self._cause is None:
            _log.error("event=ranks_broken service=%s cause=%s", self._service, cause.message)
            self._cause = cause
            self.broken.set()
            self._arrived.set()


Handlers = Mapping[str, Callable[[Any], Message]]
"""Field of the command -> what takes its message and gives the one for the same field of the result."""


class RankServer:
    """Socket of a rank, used by one thread."""

    def __init__(self, address: str, *, rank: int | None = None, linger_ms: int = 1000) -> None:
        """rank: None for a socket that only sends. linger_ms: how long the last result may take to leave after `close`."""
        self.ended_by: Any = None
        self._context, self._linger_ms = zmq.Context(), linger_ms
        self._socket = self._context.socket(zmq.DEALER)
        if rank is not None:
            self._socket.setsockopt(zmq.IDENTITY, rank_identity(rank))
        self._socket.connect(address)

    def front_gone(self) -> zmq.Socket[bytes]:
        """A socket that is readable once the front has closed its end."""
        return self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, result: Message) -> None:
        self._socket.send(result.SerializeToString())

    def commands(self, kind: type[CommandT], *, until: Sequence[Any]) -> Iterator[CommandT]:
        """Commands as they come, until one says stop, or one of `until` is readable: sockets and descriptors. That one is `ended_by`."""
        poller = zmq.Poller()
        for readable in (self._socket, *until):
            poller.register(readable, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket not in ready:
                self.ended_by = next(readable for readable in until if readable in ready)
                return
            command = kind.FromString(self._socket.recv())
            if command.WhichOneof("command") == "stop":
                return
            yield command

    def close(self) -> None:
        _end_context(self._context, linger_ms=self._linger_ms)


def _end_context(context: zmq.Context[Any], *, linger_ms: int) -> None:
    """Closes a context's sockets and waits until their messages have left, at most a little longer than `linger_ms`.

    libzmq 4.3.5 waits forever if a peer leaves while a message to it is queued, whatever the linger time. The context then stays, with
    two idle threads, until the process ends.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": linger_ms}, name="end-of-context", daemon=True)
    ending.start()
    ending.join(1e-3 * linger_ms + _END_MARGIN_S)
    if ending.is_alive():
        _log.warning("event=context_stays linger_ms=%d", linger_ms)


@dataclass(slots=True)
class CommandRunner(Generic[ResultT]):
    """Runs the commands of a rank. Each comes to a failpoint with its own name before it is carried out, and ".done" after.

    heartbeat: shows that one runs.
    """

    result: type[ResultT]
    handlers: Handlers
    rank: int
    failpoints: Failpoints = NO_FAILPOINTS
    heartbeat: Heartbeat | None = None

    def run(self, command: TrainerRankCommand | EngineRankCommand) -> ResultT:
        """The answer of the command's handler, or its error: an exception would end the rank."""
        result, name = self.result(call=command.call, rank=self.rank), command.WhichOneof("command")
        with self.heartbeat.working() if self.heartbeat is not None else nullcontext():
            try:
                assert name is not None, "the front always sets a command"
                self.failpoints.hit(name)
                getattr(result, name).CopyFrom(self.handlers[name](getattr(command, name)))
                self.failpoints.hit(f"{name}.done")
            except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
                result.error.CopyFrom(rank_error(error))
        return result


def rank_error(error: Exception) -> RankError:
    """Encodes an error for the front: a TasukiError keeps its reason, any other is logged and has none."""
    if isinstance(error, TasukiError):
        return RankError(reason=error.reason, message=error.message, metadata=error.metadata)
    _log.error("event=rank_failed", exc_info=error)
    return RankError(message=f"{type(error).__name__}: {error}")
