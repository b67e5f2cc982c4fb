"""A rank forked from its launcher, with the launcher's imports.

Importing torch and transformers takes most of a trainer's start. A CUDA driver does not survive a fork, so on GPUs ranks are spawned.
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
    """A process with those methods of `subprocess.Popen` that the launcher uses."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], taken: Sequence[signal.Signals]) -> None:
        """Starts `python -m` with the command's module and arguments. Call it before any thread starts.

        environment: added to this process's. taken: signals handled by this process, reset to their defaults in the rank.
        """
        assert threading.active_count() == 1, threading.enumerate()
        self.returncode: int | None = None
        # Blocked until the rank has reset the launcher's handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, environment, taken=taken, mask=mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """Exit code, -N for signal N; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Exit code, once it has ended."""
        return self._reap(0)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:  # the pid cannot be reused until it is reaped
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
    """Never returns, so that the rank skips the launcher's cleanup."""
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
