"""Limits the time from the process's start until its engine runs, and handles signals until then."""

import os
import signal
import traceback
from contextlib import ExitStack
from types import FrameType

from tasuki.wire.errors import DeadlineExceeded

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


class StartupDeadline:
    """Ends this process between two bytecodes of its main thread.

    With exit code 128 + N on signal N (SIGTERM, SIGINT), with 1 and a line on stderr after `seconds`. No exception is raised: libraries
    that try an import swallow exceptions, and torch, whose C++ imports modules, crashes on one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.before_exit = ExitStack()
        """Clean-up before such an exit, which runs neither `finally` nor atexit handlers. It may interrupt anything in the main thread, so
        it must not log or take locks."""
        for number in _HANDLED:
            signal.signal(number, self._end)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def finish(self) -> None:
        """Ends the limit. Handlers of SIGTERM and SIGINT remain."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        try:
            for each in _HANDLED:
                signal.signal(each, signal.SIG_IGN)
            if number == signal.SIGALRM:
                self._say_why()
            self.before_exit.close()
        except Exception:  # noqa: BLE001 - no exception leaves a handler that exits
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1 if number == signal.SIGALRM else 128 + number)

    def _say_why(self) -> None:
        error = DeadlineExceeded(
            f"the engine did not start within coordinator.stage_timeout_s = {self._seconds:g} s", rpc="start"
        )
        # A new line, since an engine rank may have left a progress bar. sys.stderr may be in the middle of a write.
        os.write(2, f"\ntasuki.rollout: {error.reason}: {error.message}\n".encode())
