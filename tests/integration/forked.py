"""Processes forked from one that has imported torch and transformers, so that tests with many ranks pay for the imports once."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["torch", "tasuki.trainer.serve", "tests.integration.breaking_rank", "tests.integration.learning"]
)


class ForkedModule:
    """Runs a module like `python -m`, by a fork of the server with its imports; has the methods of `subprocess.Popen` that tests call."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        """argv: the module and its arguments. log: receives all output."""
        self.args = [sys.executable, "-m", *argv]
        self._process = processes.Process(target=_run_module, args=(list(argv), dict(environment), log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_module(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """Runs in a new session, as a freshly started interpreter would."""
    os.setsid()
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
