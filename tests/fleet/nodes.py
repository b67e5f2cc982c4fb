"""Fleets of real nodes on one machine, each started by `tasuki fleet up`, with real engines and trainers on the CPU."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tasuki.cli import certs
from tasuki.v1.coordinator_pb2 import GetStateRequest
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_blocking_channel
from tests.conftest import ENVIRONMENT
from tests.fleet.network import Place
from tests.integration.port_node import mtls
from tests.ports import free_port

START_S = 400
READ_TIMEOUT_S = 60.0
# One rank per node, so that two nodes have the demo's two.
ALIKE = ("trainer.num_ranks=1",)


@dataclass(slots=True)
class FleetNode:
    """One node of a fleet, and the command that runs it."""

    rank: int
    place: Place
    config: Path
    state_dir: Path
    settings: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for this node only."""
    process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str], *, grace_s: float) -> None:
        argv = [*self.place.prefix, sys.executable, "-m", "tasuki.cli", "fleet", "up", self.config, "--grace-s", str(grace_s)]
        argv += [part for setting in self.settings for part in ("--set", setting)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, env={**ENVIRONMENT, **environment, **self.environment}, stdout=output, stderr=output
            )

    def signal(self, number: signal.Signals) -> None:
        """Signals `tasuki fleet up`."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def logs(self) -> str:
        """Returns the ends of all logs, for a failing test."""
        files = [self.log, *sorted((self.state_dir / "logs").glob("*.log"))]
        return "".join(f"\n--- node {self.rank} {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in files)


@dataclass(slots=True)
class RealFleet:
    nodes: list[FleetNode]
    leader: str
    name: str = "lab"
    attempt: int = 0
    grace_s: float = 0.0

    @property
    def target(self) -> str:
        """Address at which a client on node 0 calls the fleet."""
        return unix_target(self.nodes[0].state_dir, service="fleet")

    def start(self, *, ranks: Sequence[int] | None = None) -> None:
        """Starts the nodes as a scheduler does, with each node's rank and peers in its environment."""
        host, _, port = self.leader.rpartition(":")
        for node in self.nodes if ranks is None else [self.nodes[rank] for rank in ranks]:
            node.start(
                {
                    "NNODES": str(len(self.nodes)),
                    "NODE_RANK": str(node.rank),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": port,
                    "TASUKI_FLEET": self.name,
                    "TASUKI_ATTEMPT": str(self.attempt),
                },
                grace_s=self.grace_s,
            )

    def num_members(self) -> int:
        """Number of nodes that have joined; 0 while the leader is away."""
        told = self.state("--json")
        return len(json.loads(told.stdout)["fleet"]["members"]) if told.returncode == 0 else 0

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while not all("the node is up" in node.log.read_text() for node in self.nodes) or self.state("--serving").returncode:
            ended = [node.rank for node in self.nodes if node.process is not None and node.process.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"nodes {ended} ended{self.logs()}"
            time.sleep(0.5)

    def state(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.tasuki("fleet", "state", "--state-dir", self.nodes[0].state_dir, *arguments)

    def tasuki(self, *arguments: str | Path, rank: int = 0, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs the command line on a node."""
        return subprocess.run(
            [*self.nodes[rank].place.prefix, sys.executable, "-m", "tasuki.cli", *arguments],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def weights_digests(self) -> list[bytes]:
        """Digests of the checksums of all tensors in each node's rollout, as its coordinator reports them."""
        found: list[bytes] = []
        for node in self.nodes:
            with open_blocking_channel(unix_target(node.state_dir, service="coordinator")) as channel:
                state = CoordinatorServiceStub(channel).GetState(GetStateRequest(), timeout=READ_TIMEOUT_S).state
                found.append(state.weights_digest)
        return found

    def logs(self) -> str:
        return "".join(node.logs() for node in self.nodes)

    def stop(self) -> None:
        running = [node for node in self.nodes if node.process is not None and node.process.poll() is None]
        for node in running:
            node.signal(signal.SIGTERM)
        for node in running:
            node.signal(signal.SIGTERM)  # the second signal ends a grace period
        for node in running:
            node.wait(60)


@contextmanager
def real_fleet(folder: Path, places: Sequence[Place], *, base: Path, settings: Sequence[str] = ()) -> Iterator[RealFleet]:
    """Prepares nodes with mTLS, without starting them. base: the configuration."""
    hosts = [*dict.fromkeys(place.host for place in places), "localhost"]
    assert certs.run(folder / "certs", hosts=hosts, days=1, is_fleet=True) == 0
    nodes: list[FleetNode] = []
    for rank, place in enumerate(places):
        state_dir = folder / f"node{rank}"
        own = [f"state_dir={state_dir}", f"fleet.interface={place.interface}", "coordinator.stage_timeout_s=300"]
        all_settings = [*own, f"listen={place.host}:{free_port(num=3)}", *mtls(folder / "certs"), *ALIKE, *settings]
        nodes.append(FleetNode(rank, place, base, state_dir, all_settings, folder / f"node{rank}.log"))
    fleet = RealFleet(nodes, f"{places[0].host}:{free_port()}")
    try:
        yield fleet
    finally:
        fleet.stop()
