"""A rank that is a fork of its launcher, and has what the launcher has imported.

Importing torch and transformers is most of a trainer's start. A CUDA driver does not survive a fork: on GPUs ranks are spawned.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence


class ForkedRank:
    """A process with the methods of `subprocess.Popen` that the launcher calls."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], taken: Sequence[signal.Signals]) -> None:
        """Starts `python -m` of the command: a module and its arguments. Call it before any thread starts.

        environment: added to that of this process. taken: signals of this process, which do what they do by default in the rank.
        """
        assert threading.active_count() == 1, threading.enumerate()
        self.returncode: int | None = None
        # One that comes before the rank has let go of the launcher's handlers waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, environment, taken=taken, mask=mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """Exit code, -N after death by signal N; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Exit code, once it has ended."""
        return self._reap(0)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:  # until it is reaped, its pid is nobody else's
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    taken: Sequence[signal.Signals],
    mask: Iterable[int],
) -> None:
    """Never returns: what the launcher has to clean up is not the rank's."""
    code = 1
    try:
        for number in taken:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ |= environment  # noqa: TID251 - the rank's `__main__` reads it
        code = _run(command)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - a process ends here, and nobody above could tell why
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(command: Sequence[str]) -> int:
    """Exit code of `python -m`."""
    sys.argv = list(command)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
