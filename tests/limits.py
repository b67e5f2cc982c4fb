"""Time limits of process tests."""

import subprocess
import time
from collections.abc import Callable

_SLACK = 10.0
"""Factor for slow machines and for other workers' nodes on the same cores."""


def limit_s(seconds: float) -> float:
    """Returns a multiple of a time that is promised to users: only a hang or another order of magnitude fails a test."""
    return seconds * _SLACK


def end(process: subprocess.Popen[bytes], *, within_s: float = 10.0) -> None:
    """SIGTERM, and SIGKILL if the process has not ended in time."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Raises AssertionError if the condition does not hold in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
