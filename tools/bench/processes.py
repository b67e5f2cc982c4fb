"""Child programs of the benchmarks; none outlives the benchmark, even if the benchmark is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasuki.node.processes import end_descendants
from tasuki.wire.process_tree import adopt_orphans, die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
# Ranks of an engine end by themselves after their front; then the GPUs are free.
_GRACE_S, _KILL_S = 10.0, 10.0


def tied(command: Sequence[str]) -> list[str]:
    """Returns the command of a program that is killed whenever this process ends. Must be started in REPOSITORY."""
    return [sys.executable, "-m", "tools.bench.processes", str(os.getpid()), *command]


def run_to_its_end(command: Sequence[str], *, timeout_s: float) -> int:
    """Returns its exit code, or -9 if it was killed on timeout; no process that it started is left."""
    adopt_orphans()
    grace_s = 0.0
    try:
        with subprocess.Popen(tied(command), cwd=REPOSITORY) as program:
            try:
                with suppress(subprocess.TimeoutExpired):
                    program.wait(timeout_s)
                    grace_s = _GRACE_S
            finally:
                program.kill()
    finally:
        end_descendants(grace_s=grace_s, kill_s=_KILL_S, watch=lambda _: None)
    return program.returncode


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid), signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
