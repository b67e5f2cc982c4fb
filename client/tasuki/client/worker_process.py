"""A worker process of rewards or episodes, in a nest that ends with all that they have started."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any

from tasuki.client.reward_worker import Source
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
_MAX_ANSWER_BYTES = 1 << 24
_IO_TIMEOUT_S = 10
_END_S = 10.0


class WorkerEnded(Exception):
    """The worker and all that its rewards have started are gone. The text says why, as a verb of the reward."""


class WorkerProcess:
    """Answers requests; the first, sent by the constructor, are the sources.

    What a reward starts lives until the worker ends, and no longer: also if this process is killed.
    """

    def __init__(self, sources: Sequence[Source], *, start_s: float, serves: str = "tasuki.client.reward_worker") -> None:
        """start_s: time limit of the first answer. serves: the module whose `serve` the process runs."""
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
        """Of the nest; an episode's worker tells its own."""
        self._pidfd = os.pidfd_open(self._process.pid)
        with suppress(WorkerEnded):  # told by `answer`
            self.ask(list(sources), timeout_s=start_s)

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
