"""Faults in the middle of a stage of a running node, with checks that it recovers to the same state."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from tasuki.client import Client, Phase, SamplingParams, StageStatus, TrainingSample
from tasuki.config.paths import log_path, socket_dir
from tasuki.coordinator import phases
from tasuki.rpc.failpoints import Action, plant
from tests.conftest import RunningNode, assert_clean_audit
from tests.limits import limit_s
from tests.pulses import pids

PROCESSES = ("coordinator", "trainer1", "rollout", "scheduler0")
STAGES = tuple(phases.RULES)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
_NOTICED_WITHIN_S = limit_s(20.0)
_SERVICE_OF = {"trainer1": "trainer", "scheduler0": "rollout"}


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the signal. detected_s: until the supervisor notices; recovered_s: until the requested phase is reached."""

    process: str
    stage: str
    signal: str
    detected_s: float
    recovered_s: float


@contextmanager
def when_started(watcher: Client, stage: phases.Stage, action: Callable[[], object]) -> Iterator[None]:
    """Calls `action` once, on the first event that reports the start of `stage`. watcher: a client of the block alone."""
    ready, done = threading.Event(), threading.Event()

    def watch() -> None:
        for watched in watcher.watch():
            ready.set()
            event = watched.event
            if (event.stage, event.status) == (stage.number, StageStatus.STARTED.number):
                action()
                done.set()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield
    assert done.wait(1), f"{stage} has not begun"
    thread.join(10)


class ChaosNode:
    """A node and a client that trains on it."""

    def __init__(self, node: RunningNode, client: Client) -> None:
        self.node, self.client = node, client
        self.learned: list[list[float]] = []
        """`log_probs` right after the latest step."""

    def step(self) -> int:
        """Makes one optimizer step on samples that depend only on the version. Returns the version after it."""
        self.client.forward_backward(samples_of(self.client.trainer_state().policy_version))
        version = self.client.optim_step(learning_rate=1e-3).version
        self.learned = self.log_probs()
        return version

    def log_probs(self) -> list[list[float]]:
        """Returns the trainer's log-probs of samples that depend only on its version."""
        samples = samples_of(self.client.trainer_state().policy_version)
        return [one.tolist() for one in self.client.compute_log_probs(samples)]

    def lose(self, *processes: str, phase: Phase) -> None:
        """Kills the processes in the phase. Checks that trainer and engine then compute the same as before, and that the audit is clean."""
        self.step()
        self.client.acquire(Phase.ROLLOUT)
        tokens = self.greedy()
        self.client.acquire(phase)
        for process in processes:
            (pid,) = self.pids(process)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        self.client.acquire(Phase.TRAIN)
        assert self.log_probs() == self.learned
        self.client.acquire(Phase.ROLLOUT)
        assert self.greedy() == tokens
        assert_clean_audit(self.node.state_dir)

    def recovers(self, process: str, stage: phases.Stage, number: signal.Signals) -> Recovery:
        """Strikes amid the stage. Checks that the phase is reached and that nothing trained is lost."""
        self.client.acquire(Phase.TRAIN)
        is_to_rollout = stage in phases.path(phases.Stage.LOAD_TRAINER, phases.Phase.ROLLOUT)
        version = self.step() + is_to_rollout
        self.client.acquire(Phase.ROLLOUT)
        tokens = self.greedy()
        recovery = self.strike(process, stage, number)
        if is_to_rollout:
            tokens = self.greedy()
        self.client.acquire(Phase.TRAIN)
        assert self.client.trainer_state().policy_version == version
        assert self.log_probs() == self.learned
        self.client.acquire(Phase.ROLLOUT)
        assert self.client.state().policy_version == version
        # The same weights as before the strike, or after another sync.
        assert self.greedy() == tokens
        return recovery

    def strike(self, process: str, stage: phases.Stage, number: signal.Signals) -> Recovery:
        """Sends the signal while `stage` runs, and returns once the phase is reached."""
        service = phases.RULES[stage].service
        target = Phase.ROLLOUT if stage in phases.path(phases.Stage.LOAD_TRAINER, phases.Phase.ROLLOUT) else Phase.TRAIN
        if target is Phase.TRAIN:
            self.client.acquire(Phase.ROLLOUT)
        else:
            self.step()
        # The front that runs the stage waits one second; the signal is sent within it.
        plant(socket_dir(self.node.state_dir), service, stage, Action.SLOW)
        (pid,) = self.pids(process)
        struck: list[float] = []
        with (
            Client(state_dir=self.node.state_dir) as watcher,
            when_started(watcher, stage, lambda: (struck.append(time.time()), os.kill(pid, number))),
        ):
            self.client.acquire(target)
        (when,) = struck
        recovered_s = time.time() - when
        return Recovery(process, stage, number.name, self._detected(process, when), recovered_s)

    def pids(self, process: str) -> list[int]:
        return pids(self.node.state_dir, process)

    def greedy(self) -> list[list[int]]:
        return [sample.token_ids.tolist() for sample in self.client.generate(PROMPTS, GREEDY)]

    def _detected(self, process: str, struck: float) -> float:
        """Seconds until the supervisor logged a restart of the service; the changeover itself may not have needed it."""
        pattern = re.compile(rf"^(\S+ \S+) WARNING .*event=restart service={_SERVICE_OF.get(process, process)} ")
        while True:
            for line in log_path(self.node.state_dir, "supervisor").read_text().splitlines():
                if found := pattern.match(line):
                    noticed = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
                    if noticed > struck:
                        return noticed - struck
            assert time.time() < struck + _NOTICED_WITHIN_S, f"the supervisor has not noticed that {process} is gone"
            time.sleep(0.1)


def samples_of(version: int) -> list[TrainingSample]:
    random = np.random.default_rng(version)
    return [
        TrainingSample(
            prompt_token_ids=random.integers(1, 100, 4).tolist(),
            completion_token_ids=random.integers(1, 100, 6).tolist(),
            rollout_log_probs=np.full(6, -3.0, dtype=np.float32),
            advantages=float(random.normal()),
            policy_version=version,
        )
        for _ in range(8)
    ]


def write_recoveries(folder: Path, recoveries: list[Recovery]) -> None:
    """Writes recoveries.json, and recoveries.md with a row per stage and a column per process and signal."""
    folder.mkdir(parents=True, exist_ok=True)
    names = Recovery.__slots__
    (folder / "recoveries.json").write_text(
        json.dumps([{name: getattr(one, name) for name in names} for one in recoveries], indent=1)
    )
    cells = {(one.stage, one.process, one.signal): f"{one.detected_s:.1f} / {one.recovered_s:.1f}" for one in recoveries}
    columns = [(process, number) for number in ("SIGKILL", "SIGSTOP") for process in PROCESSES]
    lines = [
        "| detected / recovered, s | " + " | ".join(f"{number} {process}" for process, number in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for stage in STAGES:
        lines.append(f"| {stage} | " + " | ".join(cells.get((stage, *column), "-") for column in columns) + " |")
    (folder / "recoveries.md").write_text("\n".join(lines) + "\n")
