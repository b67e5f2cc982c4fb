"""Assembles the trainer's service and runs it, in the process of rank 0."""

import asyncio
import logging
import signal
import threading
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from tasuki.config.checks import replays_routes
from tasuki.config.choices import read_choices
from tasuki.config.gpus import gpus_of
from tasuki.config.paths import model_source, node_targets, socket_dir, training_log_path
from tasuki.config.schema import NodeConfig
from tasuki.models.images import read_image_processor
from tasuki.models.known import read_model_file, read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.rpc.commands import CommandGate
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import open_service_tracer
from tasuki.rpc.memory import staying_tags
from tasuki.rpc.port import port_of
from tasuki.rpc.process_start import StartSeconds
from tasuki.rpc.server import RpcServer
from tasuki.trainer.data.checks import BatchLimits
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.data.plan import Sharing
from tasuki.trainer.durable.restore import agree_on_log, restore
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.trainer.launch import Launch
from tasuki.trainer.other_nodes import until_another_starts
from tasuki.trainer.rank import run_rank
from tasuki.trainer.ranks import TrainerRanks
from tasuki.trainer.replicas import is_fleet, join_store
from tasuki.trainer.service.servicer import MemoryServicer, TrainerServicer
from tasuki.trainer.service.state import TrainerMetrics, TrainerState, roles_by_name
from tasuki.trainer.service.training import Training
from tasuki.trainer.wire import Role
from tasuki.v1.memory_pb2_grpc import add_MemoryServiceServicer_to_server
from tasuki.v1.ranks_pb2 import RankReady
from tasuki.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tasuki.wire.stages import Service
from tasuki.wire.tracing import Tracer

_log = logging.getLogger("tasuki.trainer")
_GRACE_S = 5.0


async def serve(config: NodeConfig, *, launch: Launch, start: StartSeconds) -> int:
    """Rank 0: serves until a signal or until the ranks fail; runs its own rank in a thread."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(launch.launcher_fd, stop.set)
    ranks = TrainerRanks(
        socket_dir=socket_dir(config.state_dir),
        launch_id=launch.launch_id,
        num_ranks=launch.num_ranks,
        collective_timeout_s=config.coordinator.stage_timeout_s,
    )
    own_rank = threading.Thread(
        target=run_rank, args=(config,), kwargs={"launch": launch, "start": start}, name="rank-0", daemon=True
    )
    own_rank.start()
    cleanup = ExitStack()
    tracer = open_service_tracer(config, service="trainer")
    cleanup.callback(tracer.close)
    try:
        ready = await _ready_or_stopped(ranks, stop)
        if ready is None:
            return 1
        failpoints = Failpoints.of(config, "trainer")
        training = await _training(ranks, ready=ready, config=config, failpoints=failpoints)
        log = TrainingLog(training_log_path(config.state_dir), failpoints=failpoints)
        cleanup.callback(log.close)
        ends: list[Awaitable[object]] = [ranks.broken.wait()]
        if is_fleet(config):
            store = await asyncio.to_thread(join_store, config, launch)
            await agree_on_log(log, store, config=config)
            ends.append(until_another_starts(config, store.name))
        start.end("planning")
        await restore(training, log, config=config)
        start.end("restoring")
        start.tell(config.state_dir, "trainer")
        server = _server(training, log, ready=ready, config=config, tracer=tracer)
        await server.start()
        heartbeat = Heartbeat(config.state_dir, "trainer")
        cleanup.callback(heartbeat.close)
        heartbeat.beat_in_loop()
        must_restart = await _run(server, ranks=ranks, ends=ends, stop=stop)
        return 1 if must_restart else 0
    finally:
        await ranks.stop()
        cleanup.close()
        loop.remove_reader(launch.launcher_fd)
        await asyncio.to_thread(own_rank.join, _GRACE_S)


async def _ready_or_stopped(ranks: TrainerRanks, stop: asyncio.Event) -> RankReady | None:
    """The ranks' report, or None if the service was stopped before they were ready."""
    ready, stopped = asyncio.ensure_future(ranks.ready()), asyncio.ensure_future(stop.wait())
    await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if ready.done():
        return ready.result()
    ready.cancel()
    return None


async def _training(ranks: TrainerRanks, *, ready: RankReady, config: NodeConfig, failpoints: Failpoints) -> Training:
    """The ranks as one trainer, once they are ready. Raises as read_choices and sample_costs."""
    boot_id = uuid.uuid4().hex
    state = TrainerState(roles_by_name(ready.roles), gate=CommandGate(failpoints, boot_id=boot_id), boot_id=boot_id)
    model, replays_old_policy = read_model_shape(model_source(config)), config.trainer.router_replay == "old_policy"
    limits = BatchLimits(
        vocab_size=ready.vocab_size,
        context_length=ready.context_length,
        micro_batch_tokens=read_choices(config.state_dir).micro_batch_tokens,
        routes=RouteShape.of(model) if replays_routes(config, model) or replays_old_policy else None,
        replays_old_policy=replays_old_policy,
        images=read_image_processor(model_source(config)),
        has_aux_loss=config.trainer.router_aux_loss_coef > 0,
        starts_from_adapter=config.trainer.lora is not None and config.trainer.lora.path is not None,
    )
    _log.info("ready ranks=%d micro_batch_tokens=%d", ranks.num_ranks, limits.micro_batch_tokens)
    if ready.HasField("nodes_rate"):
        _log.info("event=nodes_rate gbit_s=%.3f transport=%s", 8e-9 * ready.nodes_rate, ready.nodes_transport or "unknown")
    return Training(
        ranks,
        state=state,
        limits=limits,
        costs=sample_costs(config),
        ranks_per_micro_batch=config.trainer.ranks_per_micro_batch,
        sharing=Sharing.of(config, is_possible=ready.shares_prompts),
    )


def _server(training: Training, log: TrainingLog, *, ready: RankReady, config: NodeConfig, tracer: Tracer) -> RpcServer:
    server = RpcServer(
        service="trainer",
        target=node_targets(config)["trainer"],
        port=port_of(config, "trainer"),
        fleet=config.fleet,
        tracer=tracer,
    )
    gpus, state = set(gpus_of(config).trainer), training.state
    metrics = TrainerMetrics(server.registry, num_gpus=len(gpus), policy_version=lambda: state.policy_version)
    servicer = TrainerServicer(training, log=log, ready=ready, config=config, metrics=metrics)
    server.add(add_TrainerServiceServicer_to_server, servicer, "tasuki.v1.TrainerService")
    memory = MemoryServicer(
        training.ranks, state=training.state, staying=staying_tags(config, read_choices(config.state_dir), Service.TRAINER)
    )
    server.add(add_MemoryServiceServicer_to_server, memory, "tasuki.v1.MemoryService")
    return server


async def _run(server: RpcServer, *, ranks: TrainerRanks, ends: Sequence[Awaitable[object]], stop: asyncio.Event) -> bool:
    """Serves until told to stop or until one of `ends`, after which the trainer must restart. Returns whether it must."""
    watches = [asyncio.create_task(_stop_after(end, stop)) for end in ends]
    await server.run(stop, grace_s=_GRACE_S)
    must_restart = ranks.broken.is_set() or any(watch.done() for watch in watches)
    for watch in watches:
        watch.cancel()
    return must_restart


async def _stop_after(end: Awaitable[object], stop: asyncio.Event) -> None:
    await end
    stop.set()


def sample_costs(config: NodeConfig) -> dict[Role, SampleCost]:
    """Cost of a sample under every role. Raises as read_model_file."""
    trainer, policy = config.trainer, read_model_file(config.model.path)
    costs = {
        Role.POLICY: sample_cost(policy, is_frozen=trainer.lora is not None, trains_tower=trainer.tower_learns),
        Role.REFERENCE: sample_cost(policy),
    }
    if trainer.critic is not None:
        critic = policy if trainer.critic.path is None else read_model_file(trainer.critic.path)
        valued = replace(critic, shape=replace(critic.shape, is_critic=True))
        costs[Role.CRITIC] = sample_cost(valued, is_frozen=trainer.critic_lora is not None)
    return costs
