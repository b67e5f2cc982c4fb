"""The leader of a fleet: its servers on node 0, from the first join until the fleet ends."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import AsyncExitStack, closing, suppress

from tasuki.config.instance import read_instance
from tasuki.config.places import fleet_journal_path, fleet_target
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.fleet_hold import FleetHold
from tasuki.coordinator.servicer import CoordinatorServicer
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.fronts import add_fronts
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.member import Member
from tasuki.fleet.node_peer import GrpcNodePeer
from tasuki.fleet.nodes import FleetNodes
from tasuki.fleet.servicer import FleetServicer, PlanOfNodes
from tasuki.rpc import rank_store
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.port import fleet_port
from tasuki.rpc.rank_store import RankStoreServicer
from tasuki.rpc.server import RpcServer
from tasuki.rpc.service_tracer import open_service_tracer
from tasuki.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from tasuki.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from tasuki.v1.rank_store_pb2_grpc import add_RankStoreServiceServicer_to_server
from tasuki.wire.errors import FleetEnded
from tasuki.wire.tracing import NO_TRACER, Tracer

_log = logging.getLogger("tasuki.fleet")
_GRACE_S = 3.0


async def lead(config: NodeConfig, leader: Member, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, as by SIGTERM.

    leader: this node. Raises FleetEnded if the fleet cannot continue, after the nodes had time to learn of it; NodeRunning and
    InvalidArgument for an unusable port; DiskFull if the journal cannot be written.
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
        peers = [GrpcNodePeer(nodes, rank, config.coordinator) for rank in range(nodes.num_nodes)]
        fleet = Fleet(
            journal,
            peers,
            boot_id=boot_id,
            target=fleet_target(config),
            patience_s=config.coordinator.recovery_timeout_s,
            end=nodes.end,
            tracer=tracer,
        )
        server = make_server(config, fleet, journal, nodes, leader, tracer=tracer)
        await _serve(server, fleet, nodes, stop)


def make_server(
    config: NodeConfig, fleet: Fleet, journal: FleetJournal, nodes: FleetNodes, leader: Member, *, tracer: Tracer = NO_TRACER
) -> RpcServer:
    """Listens on the fleet's port, and on a unix socket in the leader's state folder."""
    assert config.fleet is not None
    address = config.fleet.leader
    server = RpcServer(service="fleet", target=fleet_target(config), port=fleet_port(config), tracer=tracer)
    coordinator = CoordinatorServicer(
        fleet,
        journal,
        PlanOfNodes(nodes),
        instance=read_instance(config.state_dir),
        port_targets={"trainer": address, "rollout": address},
        hold=FleetHold(None, journal),
    )
    server.add(add_CoordinatorServiceServicer_to_server, coordinator, "tasuki.v1.CoordinatorService")
    server.add(add_FleetServiceServicer_to_server, FleetServicer(nodes, leader), "tasuki.v1.FleetService")
    name, attempt, num_nodes = config.fleet.name, config.fleet.attempt, config.fleet.num_nodes
    store = RankStoreServicer(fleet=name, attempt=attempt, num_nodes=num_nodes)
    server.add(add_RankStoreServiceServicer_to_server, store, rank_store.NAME)
    add_fronts(server, nodes, config, epoch=nodes.command.epoch)
    return server


async def _serve(server: RpcServer, fleet: Fleet, nodes: FleetNodes, stop: asyncio.Event) -> None:
    await server.start()
    stopped = asyncio.create_task(server.serve(stop))
    ended = asyncio.create_task(nodes.ended())
    work = [asyncio.create_task(each) for each in (nodes.watch_silence(), nodes.watch_missing(), fleet.recover())]
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
    error = nodes.error
    if error is not None:
        raise FleetEnded(error.message, **error.metadata)
