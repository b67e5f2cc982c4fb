"""The leader of a fleet: its servers on node 0, which nodes join, until the fleet ends."""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from typing import Any

import grpc.aio

from tasuki.config.lock import read_instance
from tasuki.config.paths import fleet_journal_path, fleet_target, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.operations import CoordinatorServicer
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.nodes import FleetNodes, Joined, NodePeer, answered, callable_node, check_member
from tasuki.fleet.rank_store import RankStoreServicer
from tasuki.fleet.rollout_front import RolloutFront
from tasuki.fleet.trainer_front import Deal, TrainerFront
from tasuki.models.known import read_model_file
from tasuki.rollout.seeds import CallNumbers, CallSeeds
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.logs import open_service_tracer
from tasuki.rpc.port import fleet_port
from tasuki.rpc.server import RpcServer
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.plan import split_samples
from tasuki.v1 import fleet_pb2, fleet_pb2_grpc
from tasuki.v1.coordinator_pb2 import PlanRequest, PlanResponse
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub, add_CoordinatorServiceServicer_to_server
from tasuki.v1.fleet_pb2 import FleetNode
from tasuki.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from tasuki.v1.rank_store_pb2_grpc import add_RankStoreServiceServicer_to_server
from tasuki.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from tasuki.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tasuki.wire.errors import FleetEnded, StaleEpoch
from tasuki.wire.tracing import NO_TRACER, Tracer

_log = logging.getLogger("tasuki.fleet")
_GRACE_S = 3.0


async def lead(config: NodeConfig, leader: FleetNode, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, as by SIGTERM.

    leader: this node. Raises FleetEnded if the fleet cannot continue, after the nodes had time to learn of it; NodeRunning and
    InvalidArgument for an unusable port; DiskFull if the journal cannot be written; as read_model_file for the leader's model.
    """
    assert config.fleet is not None
    boot_id = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        tracer = open_service_tracer(config, service="fleet")
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        path = fleet_journal_path(config.state_dir)
        journal = stack.enter_context(closing(FleetJournal(path, failpoints=Failpoints.of(config, "fleet"))))
        epoch = journal.begin_life(boot_id, attempt=config.fleet.attempt, num_nodes=config.fleet.num_nodes)
        _log.info("event=epoch epoch=%d boot_id=%s attempt=%d", epoch, boot_id, config.fleet.attempt)
        nodes = FleetNodes(config, epoch=epoch, tracer=tracer)
        fleet = Fleet(
            journal,
            [NodePeer(nodes, rank, config.coordinator) for rank in range(nodes.num_nodes)],
            boot_id=boot_id,
            target=fleet_target(config),
            patience_s=config.coordinator.recovery_timeout_s,
            end=nodes.end,
            tracer=tracer,
        )
        server = make_server(config, fleet, journal, nodes, leader, tracer=tracer)
        await _serve(server, fleet, nodes, stop)


def make_server(
    config: NodeConfig, fleet: Fleet, journal: FleetJournal, nodes: FleetNodes, leader: FleetNode, *, tracer: Tracer = NO_TRACER
) -> RpcServer:
    """Listens on the fleet's port, and on a unix socket in the leader's state folder."""
    assert config.fleet is not None
    address, instance = config.fleet.leader, read_instance(config.state_dir)
    server = RpcServer(service="fleet", target=fleet_target(config), port=fleet_port(config), tracer=tracer)

    async def plan(request: PlanRequest) -> PlanResponse:
        # A plan covers one node and is the same on all: node 0 computes it.
        stub: Any = CoordinatorServiceStub(nodes[0].coordinator)
        return await answered(stub.Plan(request, timeout=_PLAN_TIMEOUT_S))

    coordinator = CoordinatorServicer(
        fleet, journal, plan, instance=instance, port_targets={"trainer": address, "rollout": address}
    )
    store = RankStoreServicer(fleet=config.fleet.name, attempt=config.fleet.attempt, num_nodes=config.fleet.num_nodes)
    # SGLang uses seeds on a CPU only.
    calls = CallNumbers(socket_dir(config.state_dir) / "fleet-calls", instance_id=instance.id)
    rollout = RolloutFront(nodes, seeds=CallSeeds(config.seed, calls) if config.device == "cpu" else None)
    trainer = TrainerFront(nodes, epoch=nodes.command.epoch, deal=sample_dealer(config))
    server.add(add_CoordinatorServiceServicer_to_server, coordinator, "tasuki.v1.CoordinatorService")
    server.add(add_FleetServiceServicer_to_server, FleetServicer(nodes, leader), "tasuki.v1.FleetService")
    server.add(add_RankStoreServiceServicer_to_server, store, "tasuki.v1.RankStoreService")
    server.add(add_RolloutServiceServicer_to_server, rollout, "tasuki.v1.RolloutService")
    server.add(add_TrainerServiceServicer_to_server, trainer, "tasuki.v1.TrainerService")
    return server


def sample_dealer(config: NodeConfig) -> Deal:
    """Distributes samples by their cost under the policy. Under other roles it differs only by a constant factor."""
    assert config.fleet is not None
    trainer, num_nodes = config.trainer, config.fleet.num_nodes
    cost = sample_cost(read_model_file(config.model.path), is_frozen=trainer.lora is not None)
    num_ranks = trainer.num_ranks // trainer.ranks_per_micro_batch

    def deal(lengths: Sequence[int], completions: Sequence[int]) -> list[list[int]]:
        # Samples that are too long are refused by their node.
        most = max(config.most_micro_batch_tokens, *lengths)
        return split_samples(
            lengths, completions=completions, num_nodes=num_nodes, num_ranks=num_ranks, max_tokens=most, cost=cost
        )

    return deal


async def _serve(server: RpcServer, fleet: Fleet, nodes: FleetNodes, stop: asyncio.Event) -> None:
    await server.start()
    stopped = asyncio.create_task(server.serve(stop))
    ended = asyncio.create_task(nodes.ended())
    work = [asyncio.create_task(each) for each in (nodes.watch_silence(), fleet.recover())]
    try:
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not stop.is_set():
            # Within this time every node sends a heartbeat and learns that the fleet has ended.
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 2 * nodes.heartbeat_s)
    finally:
        stop.set()
        fleet.watchers.tell(None)
        await stopped
        for task in (ended, *work):
            task.cancel()
        await fleet.stop()
        await server.stop(grace_s=_GRACE_S)
        await nodes.close()
    if nodes.error is not None:
        raise FleetEnded(nodes.error.message, **nodes.error.metadata)


_PLAN_TIMEOUT_S = 60.0
_Context = grpc.aio.ServicerContext


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """gRPC interface to the members of the fleet. leader: node 0, which the others must match."""

    def __init__(self, nodes: FleetNodes, leader: fleet_pb2.FleetNode) -> None:
        self._nodes, self._leader = nodes, leader

    async def Join(self, request: fleet_pb2.JoinRequest, context: _Context) -> fleet_pb2.JoinResponse:
        shown: Any = context.auth_context()
        names = [name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())]
        node = await asyncio.to_thread(callable_node, request.node, peer=context.peer(), certified=names, resolve=addresses_of)
        check_member(request, self._leader, config=self._nodes.config)
        await self._nodes.join(node)
        return fleet_pb2.JoinResponse(num_joined=len(self._nodes.joined), heartbeat_s=self._nodes.heartbeat_s)

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: _Context) -> fleet_pb2.HeartbeatResponse:
        config, rank = self._nodes.config, request.node_rank
        if (request.name, request.attempt) != (config.name, config.attempt):
            raise StaleEpoch(
                f"this is attempt {config.attempt} of fleet {config.name!r}, and not {request.attempt} of {request.name!r}",
                epoch=request.attempt,
                current_epoch=config.attempt,
            )
        skew_s = request.time.ToNanoseconds() * 1e-9 - time.time() if request.HasField("time") else None
        self._nodes.beat(rank, boot_id=request.boot_id, skew_s=skew_s)
        if request.ends_because:
            self._nodes.end(FleetEnded(f"node {rank} {request.ends_because}", node_rank=rank), node_rank=rank)
        return fleet_pb2.HeartbeatResponse(num_joined=len(self._nodes.joined))

    async def GetFleet(self, request: fleet_pb2.GetFleetRequest, context: _Context) -> fleet_pb2.GetFleetResponse:
        nodes = self._nodes
        return fleet_pb2.GetFleetResponse(
            name=nodes.config.name,
            attempt=nodes.config.attempt,
            epoch=nodes.command.epoch,
            num_nodes=nodes.num_nodes,
            members=[_member(joined, silent_s=nodes.silent_s(joined)) for joined in nodes.joined],
            ended_by="" if nodes.error is None else f"{nodes.error.reason}: {nodes.error.message}",
        )


def _member(joined: Joined, *, silent_s: float) -> fleet_pb2.FleetMember:
    member = fleet_pb2.FleetMember(node=joined.node, silent_s=round(silent_s, 3), clock_skew_s=joined.skew_s)
    member.join_time.FromNanoseconds(int(joined.join_time * 1e9))
    member.node.ClearField("config_keys")
    return member


def addresses_of(host: str) -> set[str]:
    """IP addresses of a host name; empty if it is unknown here."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
