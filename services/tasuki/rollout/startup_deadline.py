"""Limits the time between process start and first served call, and handles signals until then."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from types import FrameType

from tasuki.wire.errors import DeadlineExceeded


class StartupDeadline:
    """Ends this process, whatever it is doing: with exit code 128 + N on SIGTERM or SIGINT (N), with 1 and a line after `seconds`.

    It raises nothing: libraries that try an import swallow exceptions, and torch, whose C++ imports modules, crashes on one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.before_exit = ExitStack()
        """Run before such an exit, which skips `finally` and the interpreter's own, between any two bytecodes of the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._end)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def finish(self) -> None:
        """Ends the limit. SIGTERM and SIGINT still end this process, until the server takes them over."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.finish()
        try:
            self.before_exit.close()
            if number == signal.SIGALRM:
                error = DeadlineExceeded(
                    f"the engine did not start within rollout.start_timeout_s = {self._seconds:g} s", rpc="start"
                )
                os.write(
                    2, f"tasuki.rollout: {error.reason}: {error.message}\n".encode()
                )  # sys.stderr may be in the middle of a write
        finally:
            os._exit(1 if number == signal.SIGALRM else 128 + number)
