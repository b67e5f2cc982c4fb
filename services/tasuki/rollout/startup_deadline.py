"""Limits the time between process start and first served call, and handles signals until then."""

from __future__ import annotations

import signal
from types import FrameType

from tasuki.wire.errors import DeadlineExceeded

_AGAIN_S = 0.5


class StartupDeadline:
    """Raises in the main thread, whatever it is doing: SystemExit on SIGTERM or SIGINT, DeadlineExceeded after `seconds`.

    It raises repeatedly, because libraries that try an import swallow every exception. `finish` ends it.
    """

    def __init__(self, seconds: float) -> None:
        self._error: BaseException = DeadlineExceeded(
            f"the engine did not start within rollout.start_timeout_s = {seconds:g} s", rpc="start"
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)

    def finish(self) -> None:
        """Leaves SIGTERM and SIGINT to the server."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            self._error = SystemExit(128 + number)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        raise self._error
