"""`tasuki doctor` on a node of a fleet: the real port with mTLS, and measured transfers."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.load import load_config
from tasuki.config.paths import fleet_target, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import Verdict
from tasuki.doctor.node import clock_finding, fleet_findings, gradients_finding
from tasuki.fleet.lead import FleetServicer
from tasuki.fleet.nodes import FleetNodes
from tasuki.rpc.port import fleet_port
from tasuki.rpc.server import RpcServer
from tasuki.v1 import fleet_pb2, trainer_pb2
from tasuki.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from tasuki.v1.trainer_pb2_grpc import TrainerServiceServicer, add_TrainerServiceServicer_to_server
from tests.integration.port_node import make_certs, mtls
from tests.models import make_model, save_checkpoint
from tests.ports import free_port


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tasuki-") as name:
        save_checkpoint(make_model("qwen2", seed=0), Path(name) / "model")
        yield Path(name)


@pytest.fixture(scope="module")
def config(folder: Path) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text(f'state_dir = "{folder}/state"\n[model]\npath = "{folder}/model"\n')
    fleet = ["fleet.name=lab", "fleet.num_nodes=2", "fleet.node_rank=0", f"fleet.leader=localhost:{free_port()}"]
    return load_config(file, overrides=[*fleet, *mtls(make_certs(folder / "certs", is_fleet=True))])


def _member(rank: int, *, port: int) -> fleet_pb2.FleetNode:
    target = f"localhost:{port}"
    return fleet_pb2.FleetNode(
        node_rank=rank, boot_id=f"b{rank}", coordinator_target=target, trainer_target=target, rollout_target=target, num_ranks=1
    )


class MeasuredTrainers(TrainerServiceServicer):
    """Reports measurements of the trainers, as the fleet's front does."""

    def __init__(self, nodes_rate: float | None) -> None:
        self._nodes_rate = nodes_rate

    async def GetTrainerState(self, request: Any, context: Any) -> trainer_pb2.GetTrainerStateResponse:
        return trainer_pb2.GetTrainerStateResponse(nodes_rate=self._nodes_rate, nodes_transport="TCP")


@contextmanager
def leader(config: NodeConfig, members: list[fleet_pb2.FleetNode], *, nodes_rate: float | None = None) -> Iterator[None]:
    """The leader's FleetService in a thread, joined by `members`."""
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        assert config.fleet is not None
        socket_dir(config.state_dir)
        nodes = FleetNodes(config, epoch=1)
        for member in members:
            await nodes.join(member)
        port = replace(fleet_port(config), target=config.fleet.leader.replace("localhost", "127.0.0.1"))
        server = RpcServer(service="fleet", target=fleet_target(config), port=port)
        server.add(add_FleetServiceServicer_to_server, FleetServicer(nodes, members[0]), "tasuki.v1.FleetService")
        server.add(add_TrainerServiceServicer_to_server, MeasuredTrainers(nodes_rate), "tasuki.v1.TrainerService")
        await server.start()
        started.set()
        await asyncio.to_thread(stop.wait)
        await server.stop(grace_s=0)
        await nodes.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def _port(config: NodeConfig) -> int:
    assert config.fleet is not None
    return int(config.fleet.leader.rpartition(":")[2])


def test_a_whole_fleet_passes_with_measured_figures(config: NodeConfig) -> None:
    with leader(config, [_member(rank, port=_port(config)) for rank in range(2)], nodes_rate=1.25e9):
        found = {finding.name: finding for finding in fleet_findings(config)}
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}, found
    assert "6 answer" in found["fleet ports"].found
    assert "10.00 Gb/s from a node by gloo over TCP" in found["fleet gradients"].found


def test_missing_and_unreachable_nodes_fail(config: NodeConfig) -> None:
    with leader(config, [_member(0, port=_port(config)), _member(1, port=free_port())]):
        verdicts = {finding.name: finding.verdict for finding in fleet_findings(config)}
    assert verdicts["fleet ports"] is Verdict.FAIL and verdicts["fleet gradients"] is Verdict.FAIL
    with leader(config, [_member(0, port=_port(config))]):
        (first, *_) = fleet_findings(config)
    assert first.verdict is Verdict.FAIL and "missing: 1" in first.found


def measured(rate: float, over: str = "NET/Socket") -> trainer_pb2.GetTrainerStateResponse:
    return trainer_pb2.GetTrainerStateResponse(nodes_rate=rate, nodes_transport=over)


@pytest.mark.parametrize(
    ("leader_at", "device", "rate", "verdict"),
    [
        ("localhost:1", "cpu", 1e6, Verdict.OK),
        ("10.0.0.1:1", "cpu", 1e6, Verdict.FAIL),
        ("10.0.0.1:1", "cpu", 5e7, Verdict.WARN),
        ("10.0.0.1:1", "cuda", 1e9, Verdict.WARN),
        ("10.0.0.1:1", "cuda", 1e10, Verdict.OK),
    ],
)
def test_gradients_between_machines_need_a_rate(config: NodeConfig, leader_at: str, device: str, rate: float, verdict: Verdict):
    assert config.fleet is not None
    fleet = config.fleet.model_copy(update={"leader": leader_at})
    elsewhere = config.model_copy(update={"fleet": fleet, "device": device})
    assert gradients_finding(measured(rate), elsewhere).verdict is verdict
    assert gradients_finding(measured(1e10, over=""), elsewhere).verdict is Verdict.WARN  # over a transport without a name


def test_a_clock_that_is_wrong_is_told_on_every_node() -> None:
    members = [
        fleet_pb2.FleetMember(node={"node_rank": rank}, clock_skew_s=skew_s) for rank, skew_s in ((0, 0.0), (1, 0.01), (2, 4.2))
    ]
    assert clock_finding(fleet_pb2.GetFleetResponse(members=members[:2])).verdict is Verdict.OK
    wrong = clock_finding(fleet_pb2.GetFleetResponse(members=members))
    assert wrong.verdict is Verdict.WARN and wrong.found == "node 2 +4.2 s against node 0"
