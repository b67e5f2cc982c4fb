"""The front's side of the trainer ranks: one command to all of them, one answer from each, over a private unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from tasuki.v1.ranks_pb2 import RankReady, RankStop, TrainerRankCommand, TrainerRankResult
from tasuki.wire.errors import InternalError, PeerUnavailable, TasukiError, from_reason

_log = logging.getLogger("tasuki.trainer")
# Beyond the collectives' own time-out, for answers to arrive.
_ANSWER_MARGIN_S = 10.0
_LINGER_MS = 1000
_DEATH_NOTICE_S = 0.5


def ranks_address(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/trainer-ranks.sock"


def rank_identity(rank: int) -> bytes:
    return f"rank-{rank}".encode()


class Ranks:
    """Calls the ranks, one call at a time.

    When a rank dies, or some ranks fail where others do not, the ranks no longer hold the same state: the running call and all later
    ones raise, and `broken` is set for whoever runs the service to end it.
    """

    def __init__(self, *, socket_dir: Path, num_ranks: int, collective_timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.broken = asyncio.Event()
        self._cause: TasukiError | None = None
        self._timeout_s = collective_timeout_s + _ANSWER_MARGIN_S
        self._lock = asyncio.Lock()
        self._call = 0
        self._answers: dict[int, TrainerRankResult] = {}
        self._arrived = asyncio.Event()
        self._pid_fds: list[int] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        umask = os.umask(0o177)
        try:
            self._socket.bind(ranks_address(socket_dir))
        finally:
            os.umask(umask)
        self._path = socket_dir / "trainer-ranks.sock"
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def ready(self) -> RankReady:
        """Returns when every rank has loaded the model. Raises the error of the rank that could not."""
        answers = [answer.ready for answer in await self._gather()]
        for rank, answer in enumerate(answers):
            self._watch(rank, pid=answer.pid)
        return answers[0]

    async def call(self, command: TrainerRankCommand) -> list[TrainerRankResult]:
        """Runs one command in every rank, as call_each does."""
        return await self.call_each([command] * self.num_ranks)

    async def call_each(self, commands: Sequence[TrainerRankCommand]) -> list[TrainerRankResult]:
        """Runs one command of the same kind, with its own content, in each rank. Answers in order of rank.

        Raises the error that the ranks agree on, and InternalError naming the rank for any other.
        """
        async with self._lock:
            if self._cause is not None:
                raise self._cause
            self._call += 1
            self._answers.clear()
            for rank, command in enumerate(commands):
                command.call = self._call
                await self._send(rank, command)
            return await self._gather()

    async def close(self) -> None:
        """Lets the ranks go and removes the socket."""
        for rank in range(self.num_ranks):
            await self._send(rank, TrainerRankCommand(stop=RankStop()))
        self._receiver.cancel()
        for fd in self._pid_fds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._context.destroy(linger=_LINGER_MS)
        self._path.unlink(missing_ok=True)

    async def _send(self, rank: int, command: TrainerRankCommand) -> None:
        try:
            await self._socket.send_multipart([rank_identity(rank), command.SerializeToString()])
        except zmq.ZMQError as error:
            self._break(PeerUnavailable(f"trainer rank {rank} cannot be reached: {error}", rank=rank))

    async def _gather(self) -> list[TrainerRankResult]:
        """Waits for all ranks; once one has failed, the others get the collectives' time-out to answer."""
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while len(self._answers) < self.num_ranks and self._cause is None:
            self._arrived.clear()
            if deadline is None and any(answer.HasField("error") for answer in self._answers.values()):
                deadline = loop.time() + self._timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                missing = sorted(set(range(self.num_ranks)) - self._answers.keys())
                self._break(
                    InternalError(f"trainer ranks {missing} do not answer after another rank failed: {self._first_error()}")
                )
        if self._cause is not None:
            raise self._cause
        answers = [self._answers[rank] for rank in range(self.num_ranks)]
        if any(answer.HasField("error") and not answer.error.reason for answer in answers):
            # A rank whose peer was killed mostly fails in their collective before the kernel tells us of the death.
            await asyncio.sleep(_DEATH_NOTICE_S)
            if self._cause is not None:
                raise self._cause
        self._raise_errors(answers)
        return answers

    def _raise_errors(self, answers: Sequence[TrainerRankResult]) -> None:
        reasons = {answer.error.reason if answer.HasField("error") else None for answer in answers}
        if reasons == {None}:
            return
        first = next(answer for answer in answers if answer.HasField("error"))
        if len(reasons) == 1 and first.error.reason:
            raise from_reason(first.error.reason, first.error.message, dict(first.error.metadata))
        error = InternalError(f"trainer rank {first.rank} failed: {first.error.message}", rank=first.rank)
        self._break(error)
        raise error

    def _first_error(self) -> str:
        return next(
            f"rank {rank}: {answer.error.message}" for rank, answer in self._answers.items() if answer.HasField("error")
        )

    async def _receive(self) -> None:
        while True:
            _, payload = await self._socket.recv_multipart()
            answer = TrainerRankResult.FromString(payload)
            if answer.call == self._call:
                self._answers[answer.rank] = answer
                self._arrived.set()

    def _watch(self, rank: int, *, pid: int) -> None:
        """Notices the end of a rank's process at once, whatever ended it."""
        if pid == os.getpid():
            return
        fd = os.pidfd_open(pid)
        self._pid_fds.append(fd)

        def gone() -> None:
            asyncio.get_running_loop().remove_reader(fd)
            self._break(
                PeerUnavailable(f"trainer rank {rank} (pid {pid}) is gone; the trainer has to be started again", rank=rank)
            )

        asyncio.get_running_loop().add_reader(fd, gone)

    def _break(self, cause: TasukiError) -> None:
        if self._cause is None:
            _log.error("event=ranks_broken cause=%s", cause.message)
            self._cause = cause
            self.broken.set()
            self._arrived.set()
