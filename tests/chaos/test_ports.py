"""A node on ports: a client trains there under a million mutated messages and hundreds of slow connections. `make chaos`."""

import asyncio
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import grpc
import pytest

from tasuki.client import AsyncClient, Client, LossConfig, Phase, PpoLoss, SamplingParams, TrainingSample
from tasuki.config.paths import log_path, pulse_dir
from tasuki.wire.channel import open_channel
from tests.conftest import RunningNode, started_node
from tests.integration.mutations import mutated_calls
from tests.integration.port_node import SERVICES, certificate, make_certs, mtls
from tests.integration.raw_calls import answers
from tests.ports import free_port

pytestmark = pytest.mark.timeout(4 * 3600)
NUM_MUTATIONS = 1_000_000
ROTATE_S = 60.0
METHODS = {
    "coordinator": frozenset({"CoordinatorService"}),
    "trainer": frozenset({"TrainerService", "MemoryService"}),
    "rollout": frozenset({"RolloutService", "MemoryService"}),
}


@dataclass(frozen=True)
class PortedNode:
    """A running node, the ports of its services, and the folder of its certificates."""

    node: RunningNode
    ports: dict[str, int]
    certs: Path

    def target(self, service: str) -> str:
        return f"localhost:{self.ports[service]}"


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PortedNode]:
    certs = make_certs(tmp_path_factory.mktemp("certs"))
    first = free_port(num=3)
    ports = {service: first + place for place, service in enumerate(SERVICES)}
    with started_node(overrides=[f"listen=0.0.0.0:{first}", *mtls(certs)]) as node:
        yield PortedNode(node, ports, certs)


def processes(state_dir: Path) -> set[str]:
    """Names of the living processes' pulses, which contain role and pid."""
    return {pulse.name for pulse in pulse_dir(state_dir).iterdir()}


def train_one_step(client: Client) -> None:
    (sample, *_) = client.generate([[5, 6]], SamplingParams(max_new_tokens=4), num_samples=2)
    learned = TrainingSample([5, 6], sample.token_ids, sample.rollout_log_probs, 1.0, policy_version=sample.policy_version)
    client.forward_backward([learned], LossConfig(loss=PpoLoss()))
    client.optim_step()


@contextmanager
def unharmed(ported: PortedNode) -> Iterator[None]:
    """Checks that no process of the node ends or restarts in the block, and that the node trains afterwards."""
    log = log_path(ported.node.state_dir, "supervisor")
    before, lines = processes(ported.node.state_dir), len(log.read_text().splitlines())
    yield
    assert processes(ported.node.state_dir) == before
    assert log.read_text().splitlines()[lines:] == []
    with Client(ported.target("coordinator"), credentials=certificate(ported.certs, "trainer")) as client:
        train_one_step(client)


def test_a_million_mutated_messages(ported: PortedNode) -> None:
    codes: dict[str, Counter[grpc.StatusCode]] = {}
    started = time.monotonic()
    with unharmed(ported), Client(state_dir=ported.node.state_dir) as client:
        for phase in (Phase.TRAIN, Phase.ROLLOUT):
            for service in METHODS:
                client.acquire(phase)
                # In separate processes: grpcio calls back into event loops that have ended, and crashes.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as attacker:
                    attacked = attacker.submit(attack, ported.target(service), ported.certs, service, seed=len(codes))
                    codes[f"{service} in {phase}"] = attacked.result()
        client.discard_gradients()
    told = {name: {code.name: count for code, count in counts.items()} for name, counts in codes.items()}
    log_bytes = {service: log_path(ported.node.state_dir, service).stat().st_size for service in METHODS}
    folder = Path("runs/chaos")
    folder.mkdir(parents=True, exist_ok=True)
    found = {"seconds": time.monotonic() - started, "answers": told, "log_bytes": log_bytes}
    (folder / "ports.json").write_text(json.dumps(found, indent=2))
    assert sum(counts.total() for counts in codes.values()) >= NUM_MUTATIONS
    assert not any({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN} & counts.keys() for counts in codes.values()), told


def attack(target: str, certs: Path, service: str, *, seed: int) -> Counter[grpc.StatusCode]:
    async def send() -> Counter[grpc.StatusCode]:
        calls = itertools.islice(mutated_calls(seed=seed, services=METHODS[service]), NUM_MUTATIONS // 6 + 1)
        async with open_channel(target, credentials=certificate(certs, "operator")) as channel:
            return await answers(channel, calls)

    return asyncio.run(send())


def test_new_certificates_under_garbage_and_load(ported: PortedNode) -> None:
    """Guards against grpc/grpc#36693: a server crashes if it replaces a certificate at every connection, or without a pause."""
    stopped = threading.Event()

    def send_garbage() -> None:
        while not stopped.is_set():
            for port in ported.ports.values():
                try:
                    with socket.create_connection(("127.0.0.1", port)) as connection:
                        connection.sendall(os.urandom(50))
                except OSError:
                    pass
            time.sleep(0.002)  # leave the node some of the machine's CPU

    async def load() -> int:
        num_calls = 0
        async with AsyncClient(ported.target("coordinator"), credentials=certificate(ported.certs, "viewer")) as client:
            while not stopped.is_set():
                await client.state()
                await client.trainer_state()
                num_calls += 2
        return num_calls

    with unharmed(ported):
        senders = [threading.Thread(target=send_garbage) for _ in range(4)]
        for sender in senders:
            sender.start()
        rotating = threading.Thread(target=lambda: rotate(ported.certs, stopped))
        rotating.start()
        try:
            num_calls = asyncio.run(load())
        finally:
            stopped.set()
            for thread in (*senders, rotating):
                thread.join()
        assert num_calls > ROTATE_S
    for service in SERVICES:  # no log line per stranger
        assert "Handshake failed" not in log_path(ported.node.state_dir, service).read_text()


def rotate(certs: Path, stopped: threading.Event) -> None:
    """Issues new certificates of the same authority twice a second; ends the test after a while."""
    ends = time.monotonic() + ROTATE_S
    while time.monotonic() < ends and not stopped.is_set():
        make_certs(certs)
        time.sleep(0.5)
    stopped.set()
