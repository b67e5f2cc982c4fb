"""A limit on the time that a start takes, which also ends calls that block the main thread."""

from __future__ import annotations

import signal
from types import FrameType

from tasuki.wire.errors import DeadlineExceeded


class StartDeadline:
    """Raises DeadlineExceeded in the main thread `seconds` from now, unless `met` was called before."""

    def __init__(self, seconds: float) -> None:
        def expire(number: int, frame: FrameType | None) -> None:
            raise DeadlineExceeded(f"the engine did not start within rollout.start_timeout_s = {seconds:g} s", rpc="start")

        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def met(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
