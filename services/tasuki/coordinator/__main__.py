"""Runs the coordinator of one node: python -m tasuki.coordinator --config node.toml"""

import asyncio
import logging
import sys
import uuid
from functools import partial
from pathlib import Path

import uvloop

from tasuki.config.choices import read_choices
from tasuki.config.load import config_argument, load_config
from tasuki.config.lock import StateLock, read_instance
from tasuki.config.paths import journal_path, memory_record_path, node_targets, restart_request_path, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.memory_record import MemoryRecord
from tasuki.coordinator.node import Node
from tasuki.coordinator.node_metrics import NodeMetrics, serve_metrics
from tasuki.coordinator.operations import CoordinatorServicer
from tasuki.coordinator.planning import Planning
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


def main() -> int:
    path = config_argument("coordinator")
    configure_logging("coordinator")
    try:
        config = load_config(path)
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
        await _serve_node(config, tracer=tracer)
    finally:
        await asyncio.to_thread(tracer.close)
        heartbeat.close()


async def _serve_node(config: NodeConfig, *, tracer: Tracer) -> None:
    boot_id, targets = uuid.uuid4().hex, node_targets(config)
    journal = Journal(journal_path(config.state_dir), failpoints=Failpoints.of(config, "coordinator"))
    epoch = journal.begin_epoch(boot_id)
    _log.info("event=epoch epoch=%d boot_id=%s", epoch, boot_id)
    peers = Peers(targets, config.coordinator, epoch=epoch, tracer=tracer)
    record = MemoryRecord(memory_record_path(config.state_dir))
    admission = Admission(peers, config, published_bytes=journal.published_bytes, record=record)
    node = Node(
        journal,
        peers,
        boot_id=boot_id,
        trainer_target=targets["trainer"],
        rollout_target=targets["rollout"],
        restart=partial(_ask_for_restart, config.state_dir),
        recovery_timeout_s=config.coordinator.recovery_timeout_s,
        admission=admission,
        tracer=tracer,
    )
    planning = Planning(admission, config, read_choices(config.state_dir))
    instance = read_instance(config.state_dir)
    servicer = CoordinatorServicer(node, journal, planning.plan, instance=instance, port_targets=config.port_targets)
    target, port = targets["coordinator"], port_of(config, "coordinator")
    server = RpcServer(service="coordinator", target=target, port=port, fleet=config.fleet, tracer=tracer)
    server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer, "tasuki.v1.CoordinatorService")
    metrics = NodeMetrics(server.registry, config=config, node=node, journal=journal, peers=peers, planning=planning)
    await server.start()
    stop = asyncio.Event()
    work = [asyncio.create_task(each) for each in (metrics.follow(), node.recover(), _end_watches(stop, node))]
    if config.metrics.listen is not None:
        work.append(asyncio.create_task(serve_metrics(config, metrics.text)))
    try:
        await server.run(stop, grace_s=_GRACE_S)
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        await node.stop()
        await peers.close()
        journal.close()


def _ask_for_restart(state_dir: Path, service: Service, cause: str) -> None:
    """Requests a restart. The file alone is the request: on a full disk it lacks the cause."""
    request = restart_request_path(state_dir, service)
    try:
        request.write_text(cause)
    except OSError as error:
        _log.error("event=restart_cause_not_written path=%s cause=%s error=%s", request, cause, error)


async def _end_watches(stop: asyncio.Event, node: Node) -> None:
    await stop.wait()
    node.watchers.tell(None)


if __name__ == "__main__":
    sys.exit(main())
