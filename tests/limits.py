"""Time limits of process tests."""

import subprocess

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
