"""Runs the coordinator of one node: python -m tasuki.coordinator --config node.toml [--set a.b=c]..."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import uuid
from pathlib import Path

import uvloop

from tasuki.config.choices import read_choices
from tasuki.config.load import load_config
from tasuki.config.lock import Instance, StateLock, read_instance
from tasuki.config.paths import journal_path, memory_record_path, node_targets, restart_request_path, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.observe.memory_record import MemoryRecord
from tasuki.coordinator.observe.metrics_port import serve_metrics
from tasuki.coordinator.observe.node_metrics import NodeMetrics
from tasuki.coordinator.planning import Planning
from tasuki.coordinator.servicer import CoordinatorServicer
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import configure_logging, open_service_tracer
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1 import coordinator_pb2_grpc
from tasuki.wire.errors import TasukiError
from tasuki.wire.printable import printable
from tasuki.wire.stages import Service
from tasuki.wire.tracing import Tracer

_log = logging.getLogger("tasuki.coordinator")
# A changeover that runs may finish a stage in this time; the supervisor gives 5 s.
_GRACE_S = 3.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tasuki.coordinator")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    arguments = parser.parse_args(argv)
    configure_logging("coordinator")
    try:
        config = load_config(arguments.config, overrides=arguments.overrides)
        with StateLock.take(config.state_dir, name="coordinator"):
            uvloop.run(_serve(config))
    except TasukiError as error:
        sys.stderr.write(printable(f"tasuki: error {error.reason}: {error.message}") + "\n")
        return 2
    return 0


async def _serve(config: NodeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises DiskFull if its epoch cannot be written."""
    socket_dir(config.state_dir)
    heartbeat = Heartbeat(config.state_dir, "coordinator")
    heartbeat.beat_in_loop()
    tracer = open_service_tracer(config, service="coordinator")
    try:
        made = _make_node(config, uuid.uuid4().hex, tracer)
        await _serve_node(config, *made, instance=read_instance(config.state_dir), tracer=tracer)
    finally:
        await asyncio.to_thread(tracer.close)
        heartbeat.close()


def _make_node(config: NodeConfig, boot_id: str, tracer: Tracer) -> tuple[Node, Journal, Peers, Admission]:
    """Creates the node, with a new epoch in its journal. Raises DiskFull if that cannot be written."""
    targets = node_targets(config)
    journal = Journal(journal_path(config.state_dir), failpoints=Failpoints.of(config, "coordinator"))
    epoch = journal.begin_epoch(boot_id)
    _log.info("event=epoch epoch=%d boot_id=%s", epoch, boot_id)
    peers = Peers(targets, config.coordinator, epoch=epoch, tracer=tracer)
    record = MemoryRecord(memory_record_path(config.state_dir))
    admission = Admission(peers, config, published_bytes=journal.published_bytes, record=record)

    def restart(service: Service, cause: str) -> None:
        _ask_for_restart(restart_request_path(config.state_dir, service), cause)

    node = Node(
        journal,
        peers,
        boot_id=boot_id,
        trainer_target=targets["trainer"],
        rollout_target=targets["rollout"],
        restart=restart,
        recovery_timeout_s=config.coordinator.recovery_timeout_s,
        admission=admission,
        tracer=tracer,
    )
    return node, journal, peers, admission


async def _serve_node(
    config: NodeConfig,
    node: Node,
    journal: Journal,
    peers: Peers,
    admission: Admission,
    *,
    instance: Instance,
    tracer: Tracer,
) -> None:
    planning = Planning(admission, config, read_choices(config.state_dir))
    servicer = CoordinatorServicer(node, journal, planning, instance=instance, port_targets=config.port_targets)
    server = RpcServer(
        service="coordinator",
        target=node_targets(config)["coordinator"],
        port=port_of(config, "coordinator"),
        fleet=config.fleet,
        tracer=tracer,
    )
    server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer, "tasuki.v1.CoordinatorService")
    metrics = NodeMetrics(server.registry, config=config, node=node, journal=journal, peers=peers, planning=planning)
    await server.start()
    stop = asyncio.Event()
    counting = asyncio.create_task(metrics.follow())
    recovery = asyncio.create_task(node.recover())
    ending = asyncio.create_task(_end_watches(stop, node))
    serving = None if config.metrics.listen is None else asyncio.create_task(serve_metrics(config, metrics.text))
    try:
        await server.run(stop, grace_s=_GRACE_S)
    finally:
        for task in (ending, recovery, counting, *(() if serving is None else (serving,))):
            task.cancel()
        if serving is not None:
            await asyncio.wait([serving])
        await node.stop()
        await peers.close()
        journal.close()


def _ask_for_restart(request: Path, cause: str) -> None:
    """Requests a restart. The file alone is the request: on a full disk it lacks the cause."""
    try:
        request.write_text(cause)
    except OSError as error:
        _log.error("event=restart_cause_not_written path=%s cause=%s error=%s", request, cause, error)


async def _end_watches(stop: asyncio.Event, node: Node) -> None:
    await stop.wait()
    node.watchers.tell(None)


if __name__ == "__main__":
    sys.exit(main())
