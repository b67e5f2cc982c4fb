"""Checks of `tasuki doctor CONFIG` on a node of a running fleet: its members, their ports and clocks, and the rate of gradients."""

import asyncio
from collections.abc import Iterator

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.config.load import load_config
from tasuki.config.paths import config_path, nccl_log_path
from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import Finding, fail, is_running, ok, warn
from tasuki.models.known import read_model_shape
from tasuki.node.exit_report import node_down
from tasuki.rpc.port import peer_credentials
from tasuki.v1 import fleet_pb2, trainer_pb2
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.address import is_beyond_loopback
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import PeerUnavailable, TasukiError, from_rpc_error

_TIMEOUT_S = 10.0
_STATE = trainer_pb2.GetTrainerStateRequest()
_MAX_SKEW_S = 1.0
_SLOW_RATE, _NO_RATE = 1e9 / 8, 1e8 / 8
"""Thresholds between machines, in bytes per second: 1 and 0.1 Gb/s."""
_GPU_FACTOR = 10
"""Factor on the thresholds for GPU nodes."""
_GRADIENT_BYTES = 4
_SLOW_ADVICE = "look at fleet.interface, its driver and the route to the other nodes (ip route get, ethtool, logs/nccl0.log)"


def running_config(config: NodeConfig) -> NodeConfig:
    """Configuration of the running node, whose [fleet] `tasuki fleet up` has filled in; `config` if none runs."""
    path = config_path(config.state_dir)
    return load_config(path) if is_running(config) and path.is_file() else config


def fleet_findings(config: NodeConfig, *, min_gbit: float | None = None) -> Iterator[Finding]:
    """Runs every check. If the node is not up, reports only that. min_gbit: rate of gradients that the caller demands, in Gb/s."""
    if config.fleet is None:
        if min_gbit is not None:
            advice = "omit --min-gbit, or name a fleet's node"
            yield fail("fleet gradients", "the node is in no fleet, so there is no rate", advice)
        return
    try:
        fleet, unreachable, trainers = asyncio.run(_look(config))
    except TasukiError as error:
        told = error
        if type(error) is PeerUnavailable:  # usually this node is not up
            no_leader = PeerUnavailable(f"this node is running, but no leader answers at {config.fleet.leader}")
            told = no_leader if is_running(config) else node_down(config.state_dir, start="tasuki fleet up CONFIG")
        advice = f"start all nodes, then try again. Leader: {config.fleet.leader}"
        yield fail("fleet", f"{told.reason}: {told.message}", advice)
        return
    yield from member_findings(fleet)
    num_ports = sum(not target.startswith("unix:") for member in fleet.members for target in _targets(member.node))
    if unreachable:
        found = f"{len(unreachable)} of {num_ports} do not answer: {', '.join(unreachable)}"
        yield fail("fleet ports", found, "open them between nodes")
    else:
        yield ok("fleet ports", f"{num_ports} answer from here")
    yield clock_finding(fleet)
    yield gradients_finding(trainers, config, min_gbit=min_gbit)


async def _look(config: NodeConfig) -> tuple[fleet_pb2.GetFleetResponse, list[str], trainer_pb2.GetTrainerStateResponse]:
    """The fleet, addresses of nodes that do not answer, and the trainers' state with the rate that they measured at start.

    Raises TasukiError.
    """
    assert config.fleet is not None
    credentials = peer_credentials(config.security)
    async with open_channel(config.fleet.leader, credentials=credentials) as channel:
        stub = FleetServiceStub(channel)
        try:
            fleet = await stub.GetFleet(fleet_pb2.GetFleetRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        try:
            trainers = await TrainerServiceStub(channel).GetTrainerState(_STATE, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            trainers = trainer_pb2.GetTrainerStateResponse()
    targets = [target for member in fleet.members for target in _targets(member.node) if not target.startswith("unix:")]
    answers = await asyncio.gather(*(_answers(target, config) for target in targets))
    return fleet, [target for target, answer in zip(targets, answers, strict=True) if not answer], trainers


def _targets(node: fleet_pb2.FleetNode) -> tuple[str, str, str]:
    return node.coordinator_target, node.trainer_target, node.rollout_target


async def _answers(target: str, config: NodeConfig) -> bool:
    """Whether a service of a node answers, over TLS if the fleet uses it."""
    async with open_channel(target, credentials=peer_credentials(config.security)) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return True


def member_findings(fleet: fleet_pb2.GetFleetResponse) -> Iterator[Finding]:
    """Checks that all nodes have joined, which a node with other versions, models or settings cannot."""
    found = f"{len(fleet.members)} of {fleet.num_nodes} nodes of {fleet.name!r}, attempt {fleet.attempt}"
    if fleet.ended_by:
        yield fail("fleet", f"has ended: {fleet.ended_by}", "restart the job")
    elif len(fleet.members) < fleet.num_nodes:
        here = {member.node.node_rank for member in fleet.members}
        missing = ", ".join(str(rank) for rank in range(fleet.num_nodes) if rank not in here)
        yield fail("fleet", f"{found}; missing: {missing}", "read the logs of the missing nodes")
    else:
        yield ok("fleet", found)


def clock_finding(fleet: fleet_pb2.GetFleetResponse) -> Finding:
    """Compares the clocks that the nodes' heartbeats carry with the leader's."""
    skews = {member.node.node_rank: member.clock_skew_s for member in fleet.members}
    wrong = [f"node {rank} {skew_s:+.1f} s" for rank, skew_s in skews.items() if abs(skew_s) > _MAX_SKEW_S]
    if wrong:
        found = f"{', '.join(wrong)} against node 0"
        return warn("fleet clock", found, "run chrony or ntpd on all nodes: certificates and journals have times")
    return ok("fleet clock", f"all within {1000 * max(map(abs, skews.values()), default=0.0):.1f} ms of node 0")


def gradients_finding(
    trainers: trainer_pb2.GetTrainerStateResponse, config: NodeConfig, *, min_gbit: float | None = None
) -> Finding:
    """Names the transport of gradients, and rates it. min_gbit: in Gb/s, also where all nodes are on one machine."""
    assert config.fleet is not None
    name = "fleet gradients"
    if config.fleet.num_nodes == 1:
        return ok(name, "stay on the only node")
    if not trainers.HasField("nodes_rate"):
        return fail(name, "no trainer reports its rate to other nodes", "wait until the nodes serve, then try again")
    rate = trainers.nodes_rate
    num_bytes = _GRADIENT_BYTES * read_model_shape(config.model.path).num_parameters
    sent = 2 * (config.fleet.num_nodes - 1) / config.fleet.num_nodes * num_bytes
    by, factor = ("NCCL", _GPU_FACTOR) if config.device == "cuda" else ("gloo", 1)
    over = trainers.nodes_transport or "a transport that its log does not name"
    found = f"{8e-9 * rate:.2f} Gb/s from a node by {by} over {over}; a step sends {sent / 1e9:.2f} GB, in {sent / rate:.2f} s"
    if min_gbit is not None and rate < min_gbit * 1e9 / 8:
        return fail(name, f"{found}; --min-gbit demands {min_gbit:g} Gb/s", _SLOW_ADVICE)
    if is_beyond_loopback(config.fleet.leader) and rate < factor * _SLOW_RATE:
        return (fail if rate < factor * _NO_RATE else warn)(name, found, _SLOW_ADVICE)
    if not trainers.nodes_transport:
        return warn(name, found, f"unset NCCL_DEBUG_SUBSYS and restart all nodes; see {nccl_log_path(config.state_dir, 0)}")
    return ok(name, found)
