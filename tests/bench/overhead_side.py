"""One side of the overhead benchmark: a node, a run on it that goes on by turns, and the processes of both."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.supervisor.processes import SERVICE_VARIABLE
from tests.bench.processes import REPOSITORY, tied

CLI = [sys.executable, "-m", "tasuki.cli"]
LIMIT_S = 300.0
_POLL_S = 0.01
_QUIET_S, _QUIET_CPU_S, _QUIET_LIMIT_S = 0.3, 0.03, 3.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of a run. step_s: seconds a step; step_cpu_s: CPU seconds a step, of each process by its name."""

    step_s: float
    step_cpu_s: dict[str, float]

    @property
    def total_cpu_s(self) -> float:
        return sum(self.step_cpu_s.values())


@dataclass
class Side:
    """A node in `folder`. overrides: "KEY=VALUE". dashboard: its process, where one is open."""

    folder: Path
    overrides: Sequence[str]
    dashboard: subprocess.Popen[bytes] | None = None
    is_its_turn: bool = False
    _train: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _metrics: BinaryIO = field(init=False)
    _num_steps: int = field(default=0, init=False)

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def settings(self) -> list[str]:
        """Arguments of a command."""
        return [part for override in self.overrides for part in ("--set", override)]

    @contextmanager
    def up(self) -> Iterator[None]:
        """The node serves in the block."""
        subprocess.run([*CLI, "up", str(self.config), *self.settings], cwd=REPOSITORY, check=True)
        try:
            yield
        finally:
            subprocess.run([*CLI, "down", str(self.config)], cwd=REPOSITORY, check=False)

    @contextmanager
    def training(self, *, warm_steps: int) -> Iterator[None]:
        """A run that has made `warm_steps` steps and is stopped; `take_turn` goes on with it."""
        argv = [*CLI, "train", str(self.config), "--no-start", *self.settings]
        with (self.folder / "train.log").open("wb") as log:
            self._train = subprocess.Popen(tied(argv), cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            self._wait_for_run()
            with self._metrics_path.open("rb") as self._metrics:
                self._await_step(warm_steps)
                self._stop()
                yield
        finally:
            self._train.kill()
            self._train.wait()

    def take_turn(self, num_steps: int) -> Turn:
        """Goes on with the run. The step in which it was stopped is not counted."""
        assert self._train is not None
        self.is_its_turn = True
        self._train.send_signal(signal.SIGCONT)
        self._await_step(self._num_steps + 1)
        first, started, cpu_then = self._num_steps, time.perf_counter(), self._cpu_s()
        self._await_step(first + num_steps)
        seconds, cpu_now = time.perf_counter() - started, self._cpu_s()
        self._stop()
        made = self._num_steps - first
        cpu_now.subtract(cpu_then)
        return Turn(seconds / made, {name: cpu / made for name, cpu in sorted(cpu_now.items()) if cpu})

    @property
    def _metrics_path(self) -> Path:
        return self.folder / "run" / "metrics.jsonl"

    def _wait_for_run(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self._metrics_path.exists():
            self._check(deadline)
            time.sleep(_POLL_S)

    def _await_step(self, number: int) -> None:
        """Reads metrics until the run has made this many steps."""
        deadline = time.monotonic() + LIMIT_S
        while self._num_steps < number:
            self._check(deadline)
            time.sleep(_POLL_S)
            self._num_steps += self._metrics.read().count(b"\n")

    def _check(self, deadline: float) -> None:
        assert self._train is not None
        if self._train.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((self.folder / "train.log").read_text()[-2000:])

    def _stop(self) -> None:
        """Stops the run's program, and waits until its node has done what was asked of it."""
        assert self._train is not None
        self._train.send_signal(signal.SIGSTOP)
        self.is_its_turn = False
        ends = time.monotonic() + _QUIET_LIMIT_S
        before = self._cpu_s().total()
        while time.monotonic() < ends:
            time.sleep(_QUIET_S)
            now = self._cpu_s().total()
            if now - before < _QUIET_CPU_S:
                return
            before = now

    def _cpu_s(self) -> Counter[str]:
        """CPU seconds so far, by the name of service or program."""
        assert self._train is not None
        node_pid = holder(self.folder / "node", name=NODE_LOCK)
        assert node_pid is not None, "the node has ended"
        roots = {"supervisor and forked ranks": node_pid, "train": self._train.pid}
        if self.dashboard is not None:
            roots["dashboard"] = self.dashboard.pid
        seconds: Counter[str] = Counter()
        for name, pid in roots.items():
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    service = process.environ().get(SERVICE_VARIABLE, name)
                    # User and system, and those of children that have ended.
                    seconds[service] += sum(process.cpu_times()[:4])
        return seconds
