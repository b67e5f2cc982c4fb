"""Strikes processes of a running fleet in the middle of a stage, and watches the versions that its nodes serve during recovery."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from tasuki.client import Client, Phase
from tasuki.config.paths import socket_dir
from tasuki.coordinator import phases
from tasuki.rpc.failpoints import Action, plant
from tasuki.v1.rollout_pb2 import GetRolloutStateRequest
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.stages import Phase as RingPhase
from tasuki.wire.stages import Stage as RingStage
from tests.chaos_node import when_started
from tests.fleet.nodes import RealFleet
from tests.pulses import pids

STAGES = tuple(phases.RULES)
TO_ROLLOUT = phases.path(RingStage.LOAD_TRAINER, RingPhase.ROLLOUT)
_READ_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Recovery:
    """seconds: from the strike until all nodes have reached the requested phase."""

    seed: int
    node_rank: int
    process: str
    signal: str
    stage: str
    seconds: float


def strike(fleet: RealFleet, client: Client, *, rank: int, process: str, stage: RingStage, number: signal.Signals) -> float:
    """Signals a process of node `rank` while `stage` runs there. Returns the seconds until the phase is reached."""
    state_dir = fleet.nodes[rank].state_dir
    # The front that runs the stage waits one second; the signal is sent within it.
    plant(socket_dir(state_dir), phases.RULES[stage].service, stage, Action.SLOW)
    (pid,) = pids(state_dir, process)
    struck: list[float] = []
    with (
        Client(fleet.target) as watcher,
        when_started(watcher, stage, lambda: (struck.append(time.monotonic()), os.kill(pid, number))),
    ):
        client.acquire(Phase.ROLLOUT if stage in TO_ROLLOUT else Phase.TRAIN)
    return time.monotonic() - struck[0]


class ServedWatch:
    """Polls the version that each node's rollout serves. `broken`: the first time that two versions were served at once."""

    def __init__(self, fleet: RealFleet) -> None:
        self.broken = ""
        self.num_looks = 0
        self._targets = [unix_target(node.state_dir, service="rollout") for node in fleet.nodes]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ServedWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            # Ask the first node before and after the others: a version it serves both times, it also served in between.
            first, *others, again = [self._served(target) for target in (*self._targets, self._targets[0])]
            self.num_looks += first is not None
            if first is not None and first == again and any(other not in (None, first) for other in others):
                self.broken = self.broken or f"versions {[first, *others]} were served at once"

    def _served(self, target: str) -> int | None:
        with open_blocking_channel(target) as channel, suppress(grpc.RpcError):
            state = RolloutServiceStub(channel).GetRolloutState(GetRolloutStateRequest(), timeout=_READ_TIMEOUT_S)
            return state.policy_version if state.HasField("policy_version") else None
        return None


def write_recoveries(folder: Path, recoveries: Sequence[Recovery]) -> None:
    """Writes recoveries.json, and recoveries.md with the median and the maximum for each node and process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recoveries.json").write_text(json.dumps([asdict(one) for one in recoveries], indent=1) + "\n")
    by_case: dict[tuple[str, int, str], list[float]] = {}
    for one in recoveries:
        by_case.setdefault((one.process, one.node_rank, one.signal), []).append(one.seconds)
    columns = [(rank, number) for rank in sorted({one.node_rank for one in recoveries}) for number in ("SIGKILL", "SIGSTOP")]
    lines = ["| process | " + " | ".join(f"node {rank}, {number}" for rank, number in columns) + " |"]
    lines.append("|---|" + "--:|" * len(columns))
    for process in dict.fromkeys(one.process for one in recoveries):
        cells = [sorted(by_case.get((process, *column), [])) for column in columns]
        shown = [f"{times[len(times) // 2]:.1f} / {times[-1]:.1f}" if times else "-" for times in cells]
        lines.append(f"| {process} | " + " | ".join(shown) + " |")
    (folder / "recoveries.md").write_text("\n".join(lines) + "\n")
