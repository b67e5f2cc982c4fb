"""Five hundred changeovers of a node whose processes are killed and stopped at random times. `make chaos`; takes ten minutes."""

import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasuki.client import Client, Phase, SamplingParams
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import exit_path
from tasuki.node.processes import shared_memory, shared_memory_of
from tasuki.wire.address import socket_folder
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, assert_clean_audit, started_node, tasuki
from tests.footprint import MIB, Footprint, footprint, footprints
from tests.integration.node_process import is_alive
from tests.limits import wait_for
from tests.models import VOCAB_SIZE
from tests.random_strikes import Striker, draw_strikes
from tests.sockets import process_tree

SEED = int(os.environ.get("TASUKI_STRIKES_SEED") or random.SystemRandom().randrange(2**31))
NUM_ROUNDS = 250
STEP_EVERY, MANY_EVERY, LOOK_EVERY, AUDIT_EVERY, SAVE_EVERY = 8, 5, 2, 25, 80
# 32 MiB of KV cache: 2 layers, keys and values, 2 heads of 16, bfloat16. It fits only after the trainer's state has left.
_KV_TOKENS = (32 * MIB) // (2 * 2 * 2 * 16 * 2)
_BUDGET = 40 * MIB
_SETTINGS = (
    f"memory.host_budget_bytes={_BUDGET}",
    f"rollout.engine.max_total_tokens={_KV_TOKENS}",
    "trainer.compute_dtype=float32",
    "coordinator.stage_timeout_s=120",
)
_MANY = SamplingParams(max_new_tokens=240, temperature=0.0, stop_token_ids=tuple(range(VOCAB_SIZE)))
_NUM_MANY = 1200
"""Samples that end with their first token, but may need more than the whole cache until then."""
_SETTLED = 3
_REPORT = Path("runs/chaos/random_kills.json")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy version."""

    log_probs: list[list[float]]
    greedy: list[list[int]]
    many: list[list[int]]


@dataclass(frozen=True, slots=True)
class Ended:
    """Remains of a node after `tasuki down`: files of the state folder, and its report."""

    files: frozenset[str]
    report: dict[str, Any]


@contextmanager
def chaos_node() -> Iterator[ChaosNode]:
    with started_node(overrides=_SETTINGS) as node, Client(state_dir=node.state_dir) as client:
        yield ChaosNode(node, client)


def many(chaos: ChaosNode) -> list[list[int]]:
    """Generates samples of which some wait for the cache."""
    return [sample.token_ids.tolist() for sample in chaos.client.generate([[5, 6]], _MANY, num_samples=_NUM_MANY)]


def undisturbed(*, num_steps: int) -> tuple[list[Outcome], Ended]:
    """Returns the outcomes of a run without strikes, by policy version, and the remains of its node."""
    outcomes: list[Outcome] = []
    with chaos_node() as chaos:
        client = chaos.client
        for version in range(num_steps + 1):
            client.acquire(Phase.TRAIN)
            assert (chaos.step() if version else 0) == version
            log_probs = chaos.log_probs()
            client.acquire(Phase.ROLLOUT)
            outcomes.append(Outcome(log_probs, chaos.greedy(), many(chaos)))
        return outcomes, end(chaos.node)


def end(node: RunningNode) -> Ended:
    """Stops the node in order; checks that no process and no socket is left."""
    supervisor = holder(node.state_dir, name=NODE_LOCK)
    assert supervisor is not None
    pids = [*process_tree(supervisor), psutil.Process(supervisor).ppid()]
    stopped = tasuki("down", node.config, timeout_s=60)
    assert stopped.returncode == 0, stopped.stderr
    node.up.wait(60)
    assert [pid for pid in pids if is_alive(pid)] == []
    assert not socket_folder(node.state_dir).exists()
    files = {str(path.relative_to(node.state_dir)) for path in node.state_dir.rglob("*") if path.is_file()}
    # Files of restarted services do not count.
    kept = {name for name in files if ".old" not in name and not name.startswith("stalls/")}
    return Ended(frozenset(kept), json.loads(exit_path(node.state_dir).read_text()))


class Rounds:
    """Repeated round trips of a node; every result must equal the undisturbed run's."""

    def __init__(self, chaos: ChaosNode, striker: Striker, outcomes: Sequence[Outcome]) -> None:
        self._chaos, self._striker, self._outcomes = chaos, striker, outcomes
        self.version = self.num_changeovers = 0
        self.history: dict[str, list[Footprint]] = defaultdict(list)
        """Footprints in TRAIN by program and pid, including the client's."""

    def make(self, number: int) -> None:
        self._striker.begin(number)
        self._acquire(Phase.ROLLOUT)
        self._sample(is_many=number % MANY_EVERY == MANY_EVERY - 1)
        self._acquire(Phase.TRAIN)
        self._train(is_step=number % STEP_EVERY == STEP_EVERY - 1)
        if number % SAVE_EVERY == SAVE_EVERY - 1:
            self._striker.during = "save"
            # From here on a lost rank continues from this checkpoint.
            self._chaos.client.save(self._chaos.node.model.with_name(f"checkpoint-{number}"))
        self._striker.during = "nothing"
        if number % LOOK_EVERY == 0:
            for name, one in (footprints(self._chaos.node) | {"client": footprint(psutil.Process())}).items():
                self.history[name].append(one)
        if number % AUDIT_EVERY == AUDIT_EVERY - 1:
            # Audited repeatedly, since only the last logs of a service are kept.
            assert_clean_audit(self._chaos.node.state_dir)

    def _acquire(self, phase: Phase) -> None:
        self._striker.during = f"changeover to {phase.name}"
        self._chaos.client.acquire(phase)
        self.num_changeovers += 1

    def _sample(self, *, is_many: bool) -> None:
        expected = self._outcomes[self.version]
        self._striker.during = "samples"
        assert self._chaos.greedy() == expected.greedy
        if is_many:
            self._striker.during = "many samples"
            assert many(self._chaos) == expected.many
        assert self._chaos.client.state().policy_version == self.version

    def _train(self, *, is_step: bool) -> None:
        if is_step:
            self._striker.during = "step"
            self.version += 1
            assert self._chaos.step() == self.version
        self._striker.during = "log probs"
        assert self._chaos.log_probs() == self._outcomes[self.version].log_probs
        assert self._chaos.client.trainer_state().policy_version == self.version


def leaks(history: Mapping[str, Sequence[Footprint]]) -> dict[str, str]:
    """Returns processes whose last counts of descriptors or shared memory all exceed the first ones; short-lived ones are left out."""
    found: dict[str, str] = {}
    for name, seen in settled(history).items():
        for size in ("num_fds", "memfd_bytes", "shm_bytes"):
            sizes = [getattr(one, size) for one in seen]
            if min(sizes[-_SETTLED:]) > max(sizes[:_SETTLED]):
                found[name] = f"{size} {sizes}"
    return found


def settled(history: Mapping[str, Sequence[Footprint]]) -> dict[str, Sequence[Footprint]]:
    """Returns the histories of processes seen often enough, without their first samples."""
    return {name: seen[_SETTLED:] for name, seen in history.items() if len(seen) >= 3 * _SETTLED}


def strike_and_compare(chaos: ChaosNode, outcomes: Sequence[Outcome], report: dict[str, Any]) -> None:
    node, started = chaos.node, time.monotonic()
    striker = Striker(chaos, draw_strikes(SEED, num_rounds=NUM_ROUNDS))
    rounds = Rounds(chaos, striker, outcomes)
    kinds = kinds_of(node)
    try:
        for number in range(NUM_ROUNDS):
            if number == NUM_ROUNDS - 5:
                striker.end()
            rounds.make(number)
        assert rounds.version == len(outcomes) - 1
        wait_for(lambda: not any(is_alive(one.pid) for one in striker.struck))
        assert kinds_of(node) == kinds, "the node has the processes that it began with"
        assert leaks(rounds.history) == {}
    finally:
        report |= {
            "num_changeovers": rounds.num_changeovers,
            "policy_version": rounds.version,
            "seconds": round(time.monotonic() - started, 1),
            "num_strikes": len(striker.struck),
            "strikes_by_process": counted(f"{one.strike.process} {one.strike.signal.name}" for one in striker.struck),
            "strikes_during": counted(one.during for one in striker.struck),
            "num_processes_compared": len(settled(rounds.history)),
            "strikes": [one.told() for one in striker.struck],
        }


def counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def kinds_of(node: RunningNode) -> Counter[str]:
    """Counts the processes by program."""
    return Counter(name.split()[0] for name in footprints(node))


@pytest.mark.timeout(2400)
def test_five_hundred_changeovers_with_kills_and_stops_compute_what_an_undisturbed_run_does() -> None:
    sys.stdout.write(f"TASUKI_STRIKES_SEED={SEED} repeats these strikes\n")
    report: dict[str, Any] = {"seed": SEED}
    started, shared = time.monotonic(), shared_memory()
    try:
        outcomes, usual = undisturbed(num_steps=NUM_ROUNDS // STEP_EVERY)
        report["undisturbed_s"] = round(time.monotonic() - started, 1)
        with chaos_node() as chaos:
            strike_and_compare(chaos, outcomes, report)
            ended = end(chaos.node)
            report["restarts"] = ended.report["restarts"]
            report["audit"] = assert_clean_audit(chaos.node.state_dir).splitlines()[:2]
        assert ended.files == usual.files
        assert ended.report["services"] == usual.report["services"], "each was told to end"
        assert shared_memory() - shared - shared_memory_of(psutil.pids()) == set(), "new files that no process has mapped"
    finally:
        _REPORT.parent.mkdir(parents=True, exist_ok=True)
        _REPORT.write_text(json.dumps(report, indent=1) + "\n")
