"""Seconds that a fleet adds to a changeover, against the number of nodes: python -m tools.bench.fleet_scale [--out runs/bench].

The fleet is real, with its journal on this disk. The nodes are scripted coordinators on loopback ports, in a few processes, whose stages
take a fixed time and do no work. Acquire at the fleet is timed, from its call to its last event; the fleet adds whatever exceeds the
stages. One machine runs all nodes, so the figures are an upper bound of the leader's own work, without a network.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from tasuki.config.schema import NodeConfig
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.nodes import FleetNodes, NodePeer
from tasuki.fleet.rules import COMMIT, PREPARE, TO_TRAIN, digest_of
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import coordinator_pb2_grpc
from tasuki.v1.fleet_pb2 import FleetNode
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.channel import PORT_OPTIONS
from tasuki.wire.stages import Phase, Stage

STAGE_S = 0.01
NUM_TENSORS = 339
"""Checksums in a node's SYNC report for a 7B model."""
NODES_A_PROCESS = 16


class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A node that takes STAGE_S for a stage."""

    def __init__(self) -> None:
        self._at = Stage.LOAD_TRAINER

    def _state(self) -> pb.NodeState:
        holds = self._at in (PREPARE[-1], *COMMIT, *TO_TRAIN[:2])
        return pb.NodeState(stage=self._at.number, boot_id="scripted", weights_digest=digest_of(self._sums()) if holds else b"")

    def _sums(self) -> WeightSums:
        return WeightSums(policy_version=1, layout_digest=b"layout", checksums=range(NUM_TENSORS))

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        return pb.GetStateResponse(state=self._state())

    async def RunStage(self, request: pb.RunStageRequest, context: Any) -> pb.RunStageResponse:
        await asyncio.sleep(STAGE_S)
        stage = Stage.of(request.stage)
        assert stage is not None
        self._at = stage
        sums = self._sums() if stage is PREPARE[-1] else None
        return pb.RunStageResponse(state=self._state(), sums=sums)


async def serve_nodes(number: int) -> None:
    """Serves nodes until stdin closes; prints their ports."""
    servers: list[grpc.aio.Server] = []
    ports: list[int] = []
    for _ in range(number):
        server = grpc.aio.server(options=PORT_OPTIONS)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(ScriptedCoordinator(), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(None)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds as the minimum over repeats, since load by others only adds. added: beyond the stages; median: of a changeover to ROLLOUT."""

    num_nodes: int
    to_rollout_s: float
    to_train_s: float
    to_rollout_added_s: float
    to_train_added_s: float
    to_rollout_median_added_s: float


async def measure(ports: Sequence[int], folder: Path, *, repeats: int) -> Measured:
    config = NodeConfig.model_validate(
        {
            "state_dir": folder,
            "model": {"path": folder},
            "fleet": {"name": "bench", "num_nodes": len(ports), "node_rank": 0, "leader": "127.0.0.1:1"},
        }
    )
    journal = FleetJournal(folder / f"fleet-{len(ports)}.sqlite")
    nodes = FleetNodes(config, epoch=journal.begin_life("bench", attempt=0, num_nodes=len(ports)))
    for rank, port in enumerate(ports):
        address = f"127.0.0.1:{port}"
        targets = {"coordinator_target": address, "trainer_target": address, "rollout_target": address}
        await nodes.join(FleetNode(node_rank=rank, boot_id=f"n{rank}", **targets))
    peers = [NodePeer(nodes, rank, config.coordinator) for rank in range(len(ports))]
    fleet = Fleet(journal, peers, boot_id="bench", target="", patience_s=30.0, end=nodes.end)
    await fleet.recover()
    seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for number in range(repeats + 1):
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            started = time.perf_counter()
            async for _ in fleet.acquire(phase, f"{phase} {number}").follow():
                pass
            if number:  # the first changeover opens the connections
                seconds[phase].append(time.perf_counter() - started)
    await nodes.close()
    journal.close()
    to_rollout, to_train = (min(seconds[phase]) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    num_stages = len(PREPARE) + len(COMMIT), len(TO_TRAIN)
    added = [total - count * STAGE_S for total, count in zip((to_rollout, to_train), num_stages, strict=True)]
    median = statistics.median(seconds[Phase.ROLLOUT]) - num_stages[0] * STAGE_S
    return Measured(len(ports), *(round(one, 4) for one in (to_rollout, to_train, *added, median)))


async def scripted_nodes(number: int) -> AsyncIterator[list[int]]:
    """Ports of `number` nodes, in processes that end with this generator."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for first in range(0, number, NODES_A_PROCESS):
            command = [sys.executable, "-m", "tools.bench.fleet_scale", "--serve", str(min(NODES_A_PROCESS, number - first))]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        ports: list[int] = []
        for process in processes:
            assert process.stdout is not None
            ports += json.loads(await asyncio.to_thread(process.stdout.readline))
        yield ports
    finally:
        for process in processes:
            process.communicate()


async def run(most: int, *, repeats: int) -> list[Measured]:
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most]
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        async for ports in scripted_nodes(sizes[-1]):
            for size in sizes:
                found.append(await measure(ports[:size], Path(folder), repeats=repeats))
                print(found[-1], flush=True)
    return found


def draw(found: Sequence[Measured], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = [one.num_nodes for one in found]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(sizes, [1000 * one.to_rollout_added_s for one in found], "o-", label="to ROLLOUT (5 stages, decision)")
    axes.plot(sizes, [1000 * one.to_train_added_s for one in found], "s-", label="to TRAIN (4 stages)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes")
    axes.set_ylabel("ms added to a changeover")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_nodes(arguments.serve))
        return
    found = asyncio.run(run(arguments.most, repeats=arguments.repeats))
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "stage_s": STAGE_S,
        "num_tensors": NUM_TENSORS,
        "repeats": arguments.repeats,
        "results": [{name: getattr(one, name) for name in Measured.__slots__} for one in found],
    }
    (arguments.out / "fleet_scale.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(found, arguments.out / "fleet_scale.png")


if __name__ == "__main__":
    main()
