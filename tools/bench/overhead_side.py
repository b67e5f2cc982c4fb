"""One side of the overhead benchmark: a node, a run on it that proceeds in turns, and the processes of both."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.node.processes import SERVICE_VARIABLE
from tools.bench.processes import REPOSITORY, tied

CLI = [sys.executable, "-m", "tasuki.cli"]
LIMIT_S = 300.0
_POLL_S = 0.002
_FORKED = "supervisor and forked ranks"
_QUIET_S, _QUIET_CPU_S, _QUIET_LIMIT_S = 0.2, 0.02, 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps of a run in one turn. step_s: seconds per step; step_cpu_s: CPU seconds per step, by process name."""

    step_s: float
    step_cpu_s: dict[str, float]

    @property
    def total_cpu_s(self) -> float:
        return sum(self.step_cpu_s.values())

    @property
    def work_cpu_s(self) -> float:
        """CPU seconds of the engine and the trainer, whose processes run none of the observers."""
        return sum(self.step_cpu_s.get(name, 0.0) for name in (_FORKED, "rollout", "trainer"))


@dataclass
class Side:
    """A node in `folder`. overrides: "KEY=VALUE". dashboard: its process, where one is open.

    The run waits in its reward function, between generation and training, where the node has nothing to do.
    """

    folder: Path
    overrides: Sequence[str]
    environment: Mapping[str, str]
    dashboard: subprocess.Popen[bytes] | None = None
    is_its_turn: bool = False
    _train: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _metrics: BinaryIO | None = field(default=None, init=False)
    _num_steps: int = field(default=0, init=False)

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def settings(self) -> list[str]:
        """Arguments of a command."""
        return [part for override in self.overrides for part in ("--set", override)]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Starts a run that waits for its first turn; its node already serves."""
        self._hold.touch()
        argv = [*CLI, "train", str(self.config), "--no-start", *self.settings]
        with (self.folder / "train.log").open("wb") as log:
            self._train = subprocess.Popen(tied(argv), cwd=REPOSITORY, env=self.environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            self._train.kill()
            self._train.wait()
            if self._metrics is not None:
                self._metrics.close()

    def warm_up(self, num_steps: int) -> None:
        self._await(self._arrived.exists)
        self.take_turn(num_steps)

    def take_turn(self, num_steps: int) -> Turn:
        """Measures whole steps, from one arrival at the gate to another."""
        self.is_its_turn = True
        first, cpu_then = self._num_steps, self._cpu_s()
        self._arrived.unlink()
        started = time.perf_counter()
        self._hold.unlink()
        self._await(lambda: self._steps_made() >= first + num_steps)
        self._hold.touch()
        self._await(self._arrived.exists)
        seconds = time.perf_counter() - started
        self.is_its_turn = False
        self._await_quiet()
        cpu_now, made = self._cpu_s(), self._steps_made() - first
        cpu_now.subtract(cpu_then)
        return Turn(seconds / made, {name: cpu / made for name, cpu in sorted(cpu_now.items()) if cpu})

    @property
    def _hold(self) -> Path:
        return self.folder / "hold"

    @property
    def _arrived(self) -> Path:
        return self.folder / "arrived"

    def _steps_made(self) -> int:
        if self._metrics is None:
            metrics = self.folder / "run" / "metrics.jsonl"
            if not metrics.exists():
                return 0
            self._metrics = metrics.open("rb")
        self._num_steps += self._metrics.read().count(b"\n")
        return self._num_steps

    def _await(self, is_so: Callable[[], bool]) -> None:
        assert self._train is not None
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            if self._train.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "train.log").read_text()[-2000:])
            time.sleep(_POLL_S)

    def _await_quiet(self) -> None:
        """Waits until the side's processes have finished deferred work, such as sending spans."""
        ends = time.monotonic() + _QUIET_LIMIT_S
        before = self._cpu_s().total()
        while time.monotonic() < ends:
            time.sleep(_QUIET_S)
            now = self._cpu_s().total()
            if now - before < _QUIET_CPU_S:
                return
            before = now

    def _cpu_s(self) -> Counter[str]:
        """CPU seconds so far, by service or program."""
        assert self._train is not None
        node_pid = holder(self.folder / "node", name=NODE_LOCK)
        assert node_pid is not None, "the node has ended"
        roots = {_FORKED: node_pid, "train": self._train.pid}
        if self.dashboard is not None:
            roots["dashboard"] = self.dashboard.pid
        seconds: Counter[str] = Counter()
        for name, pid in roots.items():
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    service = process.environ().get(SERVICE_VARIABLE, name)
                    # User and system time, with that of children that have ended.
                    seconds[service] += sum(process.cpu_times()[:4])
        return seconds


@contextmanager
def all_up(sides: Sequence[Side]) -> Iterator[None]:
    """Starts the nodes of all sides at the same time."""
    try:
        started = [
            subprocess.Popen([*CLI, "up", str(side.config), *side.settings], cwd=REPOSITORY, env=side.environment)
            for side in sides
        ]
        codes = [up.wait() for up in started]
        if any(codes):
            raise RuntimeError("a node could not be started; its output is above")
        yield
    finally:
        ends = [subprocess.Popen([*CLI, "down", str(side.config)], cwd=REPOSITORY) for side in sides]
        for end in ends:
            end.wait()
