"""Every process of either node killed and stopped in the middle of a changeover: the fleet recovers, and the run's figures are unchanged.

By default a few cases run; with TASUKI_PROOFS=whole every process, signal and node, for three seeds that draw the stages. Writes
runs/fleet.
"""

import itertools
import json
import random
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tasuki.client import Client, Phase
from tasuki.wire.stages import Stage
from tests.extent import IS_WHOLE
from tests.fleet.batches import batch, losses_alone, write_node
from tests.fleet.chaos_fleet import STAGES, TO_ROLLOUT, Recovery, ServedWatch, strike, write_recoveries
from tests.fleet.network import places_of
from tests.fleet.nodes import RealFleet, real_fleet

PROCESSES = ("coordinator", "trainer", "rollout", "scheduler0", "fleet")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
# A node needs 8 s to be sure of a hang; the fleet must not give the node up earlier.
SETTINGS = ("restart.max_restarts=1000", "coordinator.stage_timeout_s=160")
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    rank: int
    process: str
    number: signal.Signals
    stage: Stage

    def __str__(self) -> str:
        return f"{self.seed}-node{self.rank}-{self.process}-{self.number.name}-{self.stage}"


def cases(seed: int) -> list[Case]:
    """Every node, process and signal, in an order and at stages drawn from the seed; any nine neighbours cover all stages."""
    draw = random.Random(seed)
    struck = list(itertools.product((0, 1), PROCESSES, SIGNALS))
    draw.shuffle(struck)
    stages = draw.sample(STAGES, len(STAGES))
    return [Case(seed, *one, stage) for one, stage in zip(struck, itertools.cycle(stages), strict=False)]


CASES = [case for seed in range(3) for case in cases(seed)] if IS_WHOLE else cases(0)[4::4]


@dataclass
class Run:
    """One run over all cases. expected: losses of the same batches without faults."""

    fleet: RealFleet
    client: Client
    watch: ServedWatch
    expected: list[float]
    losses: list[float] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    def step(self) -> None:
        self.client.acquire(Phase.TRAIN)
        number = len(self.losses)
        self.losses.append(self.client.forward_backward(batch(number)).loss)
        assert self.client.optim_step().version == number + 1


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="tasuki-") as name:
        folder = Path(name)
        base = write_node(folder)
        expected = losses_alone(folder, num_steps=len(CASES) + 1)
        with places_of(2) as places, real_fleet(folder, places, base=base, settings=SETTINGS) as fleet:
            fleet.start()
            fleet.wait_until_up()
            with Client(fleet.target) as client, ServedWatch(fleet) as watch:
                yield Run(fleet, client, watch, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fleet_recovers(run: Run, case: Case) -> None:
    run.step()
    if case.stage not in TO_ROLLOUT:
        run.client.acquire(Phase.ROLLOUT)
    seconds = strike(run.fleet, run.client, rank=case.rank, process=case.process, stage=case.stage, number=case.number)
    run.recoveries.append(Recovery(case.seed, case.rank, case.process, case.number.name, case.stage, seconds))
    write_recoveries(Path("runs/fleet"), run.recoveries)
    run.client.acquire(Phase.ROLLOUT)
    assert run.client.state().policy_version == len(run.losses)
    one, other = run.fleet.weights_digests()
    assert one == other != b""
    assert run.watch.broken == ""


def test_the_run_ends_with_the_figures_of_one_without_faults_and_clean_journals(run: Run) -> None:
    run.step()
    assert run.losses == pytest.approx(run.expected[: len(run.losses)], abs=1e-5)
    assert run.watch.num_looks > 0
    for node in run.fleet.nodes:
        audited = run.fleet.tasuki("audit", node.state_dir, "--json")
        assert audited.returncode == 0, audited.stdout + audited.stderr
    assert json.loads(run.fleet.tasuki("audit", run.fleet.nodes[0].state_dir, "--json").stdout)["num_fleet_decisions"] >= len(
        run.recoveries
    )
