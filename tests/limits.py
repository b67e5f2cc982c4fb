"""Time limits of process tests: as promised to users, and longer if other tests run at the same time."""

from __future__ import annotations

import os
import subprocess

_SHARED = 10.0
"""Factor for two workers on two cores, each with a node of several processes, on a machine with other load."""


def limit_s(seconds: float) -> float:
    """Returns `seconds`, or a multiple of it in a pytest-xdist worker."""
    return seconds * _SHARED if "PYTEST_XDIST_WORKER" in os.environ else seconds


def end(process: subprocess.Popen[bytes], *, within_s: float = 10.0) -> None:
    """SIGTERM, and SIGKILL if the process has not ended in time."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
