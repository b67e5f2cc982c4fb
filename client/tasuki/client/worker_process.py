"""A worker process of rewards or episodes, in a nest that ends with all that they have started."""

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tasuki.client.aside import Aside
from tasuki.client.reward_worker import Signature, Source
from tasuki.wire.errors import InvalidArgument, RewardFailed
from tasuki.wire.process_tree import kill_marked, new_mark

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tasuki.wire.process_tree import run_nested
def work():
    import importlib
    importlib.import_module(sys.argv[4]).serve(int(sys.argv[2]))
run_nested(work, lifeline_fd=int(sys.argv[3]), mark=int(sys.argv[5]))
"""
_START_TIMEOUT_S = 60.0
"""Of a new interpreter and the import of the user's module."""
LOOK_EVERY_S = 0.1
_MAX_LOST_STARTS = 3
_MAX_ANSWER_BYTES = 1 << 24
_IO_TIMEOUT_S = 10
_END_S = 10.0
_Answer = TypeVar("_Answer")


class WorkerEnded(Exception):
    """The worker and all that its rewards have started are gone. The text says why, as a verb of the reward."""


class WorkerProcess:
    """Answers requests; the first, sent by the constructor, are the sources.

    What a reward starts lives until the worker ends, and no longer: also if this process is killed.
    """

    def __init__(self, sources: Sequence[Source], *, serves: str) -> None:
        """serves: the module whose `serve` the process runs."""
        nest_end, self._lifeline = Pipe(duplex=False)
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # of a worker that stops in the middle of a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _IO_TIMEOUT_S, 0))
        self._connection = Connection(ours.detach())
        fds = theirs.fileno(), nest_end.fileno()
        self._mark, paths = new_mark(), json.dumps([str(path) for path in sys.path])
        with theirs, nest_end:
            # A new interpreter, since a forked child would inherit gRPC's threads and locks in an unknown state.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, paths, *map(str, fds), serves, str(self._mark)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C interrupts the run alone
            )
        self.pid = self._process.pid
        """Of the nest, until the worker has told its own."""
        self._pidfd = os.pidfd_open(self._process.pid)
        with suppress(WorkerEnded):  # told by `answer`
            self.ask(list(sources), timeout_s=_START_TIMEOUT_S)

    def ask(self, request: object, *, timeout_s: float) -> None:
        """Sends a request. Raises WorkerEnded if the worker is gone."""
        self._limit_s, self._ends = timeout_s, time.monotonic() + timeout_s
        try:
            if self._pidfd >= 0 and not connection.wait([self._pidfd], timeout=0):
                self._connection.send(request)
                return
        except OSError:
            pass
        raise WorkerEnded(f"ended its worker process ({self.end()})")

    def waits(self) -> tuple[Connection, int]:
        """What becomes readable with an answer, or when the worker has ended."""
        return self._connection, self._pidfd

    def answer(self, readable: Collection[object]) -> Any:
        """The answer to the request; None while it is out. readable: those of `waits` that are. Raises WorkerEnded, also for a late one."""
        if not any(each in readable for each in self.waits()):
            if time.monotonic() < self._ends:
                return None
            self.end()
            raise WorkerEnded(f"gave no answer within {self._limit_s:g} s; its worker was killed")
        try:
            if self._connection.poll():
                self._ends = math.inf  # until something else is asked
                return json.loads(self._connection.recv_bytes(_MAX_ANSWER_BYTES))
        except (EOFError, OSError, ValueError):
            pass  # it has ended, has closed its end, or something else has written there
        raise WorkerEnded(f"ended its worker process ({self.end()})")

    def end(self) -> str:
        """Kills the worker and all that its rewards have started. Returns how the worker has ended."""
        self._lifeline.close()
        self._connection.close()
        if self._pidfd >= 0:
            self._process.send_signal(signal.SIGCONT)  # a reward may have stopped the nest
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._pidfd)
            self._pidfd = -1
            if self._process.returncode < 0:  # a reward has killed the nests above it
                kill_marked(self._mark)
        return f"exit code {self._process.returncode}"


class Workers:
    """The worker processes of a pool, and a thread that waits for them."""

    def __init__(self, sources: Sequence[Source], functions: Sequence[str], *, key: str, num: int, serves: str) -> None:
        """functions: what the sources are called. serves: as of WorkerProcess.

        Raises InvalidArgument naming `key` and a function that cannot be used.
        """
        self._make = partial(WorkerProcess, sources, serves=serves)
        self.all = [self._make() for _ in range(num)]
        self.starting = set(self.all)
        """Those that have not answered yet."""
        self._num_lost_starts = 0
        self._aside = Aside("tasuki-workers")
        self.signatures: list[Signature] = []
        try:
            self.call(lambda is_over: self._start(is_over, functions, key=key))
        except BaseException:
            self.close()
            raise

    def started(self) -> list[WorkerProcess]:
        return [worker for worker in self.all if worker not in self.starting]

    def call(self, work: Callable[[threading.Event], _Answer]) -> _Answer:
        """Runs `work` on the thread. Its event is set once nobody waits for the answer: the caller may have been interrupted."""
        is_over = threading.Event()
        try:
            return self._aside.call(lambda: work(is_over))
        finally:
            is_over.set()

    def told(
        self, workers: Sequence[WorkerProcess], *others: int, timeout_s: float = LOOK_EVERY_S
    ) -> list[tuple[WorkerProcess, Any, str]]:
        """Waits a moment for workers, or other descriptors. Returns those that have answered, and those that have ended with how."""
        readable = set(connection.wait([*others, *(each for worker in workers for each in worker.waits())], timeout_s))
        told: list[tuple[WorkerProcess, Any, str]] = []
        for worker in workers:
            try:
                if (answer := worker.answer(readable)) is None:
                    continue
            except WorkerEnded as ended:
                told.append((worker, None, str(ended)))
                continue
            if worker not in self.starting:
                told.append((worker, answer, ""))
                continue
            self.starting.discard(worker)
            self._num_lost_starts = 0
            signatures, worker.pid = answer
            self.signatures = [Signature(*each) for each in signatures]
        return told

    def replace_ended(self, worker: WorkerProcess, how: str) -> None:
        """Starts another in a worker's place. Raises RewardFailed for the third in a row that has ended before its first answer."""
        is_start = worker in self.starting
        self.replace(worker)
        self._num_lost_starts += is_start
        if is_start and self._num_lost_starts >= _MAX_LOST_STARTS:
            raise RewardFailed(f"{self._num_lost_starts} reward workers could not start: the last {how}", cause=how)

    def replace(self, worker: WorkerProcess) -> None:
        """Ends a worker, and starts another in its place."""
        worker.end()
        self.starting.discard(worker)
        another = self.all[self.all.index(worker)] = self._make()
        self.starting.add(another)

    def close(self) -> None:
        """Ends the workers, and every process that they have started, immediately."""
        self._aside.close()
        for worker in self.all:
            worker.end()

    def _start(self, is_over: threading.Event, functions: Sequence[str], *, key: str) -> None:
        """Waits for the first worker that has imported the functions."""
        while not self.signatures and not is_over.is_set():
            for *_, how in self.told(list(self.starting)):
                raise InvalidArgument(key, f"cannot use {functions[0]}: its import {how}")
        for function, signature in zip(functions, self.signatures, strict=False):
            if signature.problem:
                raise InvalidArgument(key, f"cannot use {function}: {signature.problem}")
