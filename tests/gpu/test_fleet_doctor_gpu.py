"""A fleet of two nodes that share one card: HSDP 2x1 by NCCL over sockets, and the doctor's report.

NCCL refuses two ranks on one GPU of one host. With separate host ids it takes them for two hosts, and uses its network. Needs `make
native`, a CUDA GPU and no network; with root, `ip` and veth pairs each node has a network namespace.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.client import Client, Phase, SamplingParams, TrainingSample
from tests.fleet.chaos_fleet import pids
from tests.fleet.network import Place, can_make_namespaces, places_of
from tests.fleet.nodes import RealFleet, real_fleet
from tests.gpu.node_settings import GPU
from tests.integration.fleet_trainers import logs_of_unconnected
from tests.models import make_model, save_checkpoint

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "client" / "examples" / "demo"
NUM_STEPS, CONNECT_S = 2, 30
PROMPTS = [[4 + digit, 5, 6, 7, 14] for digit in range(8)]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]
Record = Callable[[str, object], None]


def demo_node(folder: Path) -> Path:
    subprocess.run([sys.executable, DEMO / "make_task.py", folder / "task", "--seed", "0"], check=True)
    shutil.copy(ROOT / "deploy" / "config" / "demo.toml", folder / "demo.toml")
    shutil.copy(DEMO / "reward.py", folder / "reward.py")
    return folder / "demo.toml"


def generated(client: Client) -> list[TrainingSample]:
    """Generates on both nodes' engines. Advantages have both signs, so that there is a gradient."""
    samples = client.generate(PROMPTS, SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=1.0), num_samples=2)
    return [
        TrainingSample(
            prompt_token_ids=PROMPTS[sample.prompt_index],
            completion_token_ids=sample.token_ids,
            rollout_log_probs=sample.rollout_log_probs,
            advantages=1.0 if sample.sample_index else -1.0,
            policy_version=sample.policy_version,
        )
        for sample in samples
    ]


def doctor(fleet: RealFleet, base: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code, and the findings about the fleet."""
    told = fleet.tasuki("doctor", base, "--set", f"state_dir={fleet.nodes[0].state_dir}", "--json", *arguments, timeout_s=120)
    findings = [one for one in json.loads(told.stdout) if one["name"].startswith("fleet")]
    return told.returncode, {one["name"]: one for one in findings}


@dataclass(frozen=True, slots=True)
class Card:
    """Two serving nodes on one card. digests, crossed: for every step so far."""

    fleet: RealFleet
    base: Path
    places: Sequence[Place]
    start_s: float
    digests: list[bytes] = field(default_factory=list)
    crossed: list[int] = field(default_factory=list)

    def step(self, client: Client) -> None:
        """Generates on both nodes, trains, and has both serve the same new weights. Counts the bytes that cross in the optimizer step."""
        client.acquire(Phase.ROLLOUT)
        samples = generated(client)
        client.acquire(Phase.TRAIN)
        client.forward_backward(samples)
        before = self._received()
        assert client.optim_step().version == len(self.digests) + 1
        self.crossed.append(self._received() - before)
        client.acquire(Phase.ROLLOUT)
        (digest,) = set(self.fleet.weights_digests())
        self.digests.append(digest)

    def _received(self) -> int:
        return sum(place.received_bytes() for place in self.places)


@contextmanager
def card(folder: Path, settings: Sequence[str]) -> Iterator[Card]:
    base = demo_node(folder)
    with places_of(2) as places, real_fleet(folder, places, base=base, settings=settings) as fleet:
        for node in fleet.nodes:
            node.environment["NCCL_HOSTID"] = f"node-{node.rank}"
        started = time.monotonic()
        fleet.start()
        fleet.wait_until_up()
        yield Card(fleet, base, places, round(time.monotonic() - started, 1))


def check_figures(one: Card, *, transport: str, record: Record) -> None:
    fleet, is_apart = one.fleet, one.places[0].host != one.places[1].host
    record("start_s", one.start_s)
    with Client(fleet.target) as client:
        for _ in range(NUM_STEPS):
            one.step(client)
        num_parameters = client.trainer_state().num_parameters
    _, found = doctor(fleet, one.base)
    record("doctor", {name: f"{finding['verdict']}: {finding['found']}" for name, finding in found.items()})
    gradient_bytes = 2 * 4 * num_parameters
    record("crossed_bytes", {"optim_step": one.crossed, "gradients": gradient_bytes, "namespaces": is_apart})
    assert len(set(one.digests)) == NUM_STEPS
    # NCCL's protocol for short messages sends a flag with every word.
    assert all(gradient_bytes <= each for each in one.crossed)
    assert not is_apart or max(one.crossed) < 3 * gradient_bytes
    assert not [finding for finding in found.values() if finding["verdict"] == "fail"], found
    gradients = found["fleet gradients"]["found"]
    assert transport in gradients
    rate_gbit = float(gradients.split(" Gb/s")[0])
    code, refused = doctor(fleet, one.base, "--min-gbit", str(rate_gbit + 1))
    assert code == 1 and refused["fleet gradients"]["verdict"] == "fail"
    assert f"--min-gbit demands {rate_gbit + 1:g} Gb/s" in refused["fleet gradients"]["found"]
    _, allowed = doctor(fleet, one.base, "--min-gbit", str(rate_gbit / 2))
    assert allowed["fleet gradients"]["verdict"] != "fail"


def check_recovery(one: Card, *, record: Record) -> None:
    (pid,) = pids(one.fleet.nodes[1].state_dir, "trainer")
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with Client(one.fleet.target) as client:
        one.step(client)
    record("step_after_kill_s", round(time.monotonic() - started, 1))
    assert len(set(one.digests)) == len(one.digests)


@pytest.fixture(scope="module")
def on_one_card() -> Iterator[Card]:
    # Not pytest's own folder: the path of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="tasuki-") as name, card(Path(name), GPU) as one:
        yield one


@pytest.fixture
def record(record_property: Record, capsys: pytest.CaptureFixture[str]) -> Record:
    def tell(name: str, value: object) -> None:
        record_property(name, value)
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {value}")

    return tell


def test_two_nodes_on_one_card_train_over_nccls_sockets_and_the_doctor_names_and_asserts_their_rate(
    on_one_card: Card, record: Record
) -> None:
    check_figures(on_one_card, transport="by NCCL over NET/Socket", record=record)


def test_a_killed_trainer_is_followed_by_the_other_nodes_and_both_go_on(on_one_card: Card, record: Record) -> None:
    check_recovery(on_one_card, record=record)


@pytest.mark.skipif(not can_make_namespaces(), reason="needs network namespaces")
def test_an_interface_that_the_other_node_cannot_reach_fails_in_time(tmp_path: Path) -> None:
    model = save_checkpoint(make_model("qwen2", seed=0), tmp_path / "model")
    for log in logs_of_unconnected(tmp_path, model, connect_s=CONNECT_S, most_s=CONNECT_S + 60, device="cuda"):
        assert "PEER_UNAVAILABLE" in log and "of the fleet lab by NCCL" in log and "set fleet.interface" in log, log
