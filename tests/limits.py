"""Time limits of tests about processes: as a user is promised them, and longer where other tests run at the same time."""

from __future__ import annotations

import os
import subprocess

_SHARED = 10.0
"""Two workers on two cores, each with a node of several processes, beside whatever else the machine does."""


def limit_s(seconds: float) -> float:
    """`seconds`, or a multiple of them for a worker of pytest-xdist."""
    return seconds * _SHARED if "PYTEST_XDIST_WORKER" in os.environ else seconds


def end(process: subprocess.Popen[bytes], *, within_s: float = 10.0) -> None:
    """SIGTERM, and SIGKILL if the process has not ended in time."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
