"""The rollout service: its gRPC interface, assembled and run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

import grpc
import grpc.aio
import uvloop

from tasuki.config import paths
from tasuki.config.choices import read_choices
from tasuki.config.gpus import gpus_of
from tasuki.config.lock import read_instance
from tasuki.config.schema import NodeConfig
from tasuki.rollout.metrics import EngineLoad, EngineMetrics, GenerationMetrics, keep_metrics_in_memory
from tasuki.rollout.model import ModelFacts
from tasuki.rollout.ranks import RankProcesses, RankReport
from tasuki.rollout.rollout import RankCalls, Rollout, RolloutMemoryServicer
from tasuki.rollout.seeds import CallNumbers, CallSeeds
from tasuki.rollout.sglang.engine import RolloutEngine, start_engine
from tasuki.rollout.sync import WeightSync
from tasuki.rpc.commands import CommandGate, remaining_s
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import configure_logging, open_service_tracer
from tasuki.rpc.memory import staying_tags
from tasuki.rpc.port import port_of
from tasuki.rpc.process_start import StartSeconds, StartupDeadline
from tasuki.rpc.server import RpcServer
from tasuki.v1 import memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from tasuki.wire.errors import DeadlineExceeded, InternalError
from tasuki.wire.routes import in_parts
from tasuki.wire.stages import Service

# A token and its log-prob take at most 9 bytes, so that even with the longest last sample a message stays below 4 MiB.
_MAX_BUNDLE_TOKENS = 131_072
_TOKENS_FOR_FIELDS = 8


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """gRPC interface of the rollout service."""

    def __init__(self, rollout: Rollout, gate: CommandGate, *, metrics: GenerationMetrics) -> None:
        self._rollout, self._gate, self._metrics = rollout, gate, metrics

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        with self._metrics.generating():
            async for samples in self._rollout.generate(request):
                self._metrics.ended(samples)
                for bundle in _bundles(samples):
                    yield rollout_pb2.GenerateResponse(samples=bundle)

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ReceiveWeightsResponse:
        receive = partial(self._rollout.receive, request.weights, timeout_s=remaining_s(context))
        return await self._gate.stage(request, receive)

    async def Drain(self, request: rollout_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> rollout_pb2.DrainResponse:
        drain = partial(self._rollout.drain, grace_s=request.grace_ms / 1000, timeout_s=remaining_s(context))
        return await self._gate.stage(request, drain)

    async def GetRolloutState(
        self, request: rollout_pb2.GetRolloutStateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetRolloutStateResponse:
        rollout, engine = self._rollout, self._rollout.engine
        self._gate.look(request.epoch)
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=rollout.boot_id,
            epoch=self._gate.epoch,
            sequence=self._gate.sequence,
            stage=rollout.stage.number if rollout.stage else types_pb2.STAGE_UNSPECIFIED,
            resident_tags=[tag.number for tag in rollout.ranks.resident_tags],
            policy_version=rollout.policy_version,
            received_version=rollout.received_version,
            is_poisoned=rollout.poison_reason is not None,
            poison_reason=rollout.poison_reason or "",
            num_running=rollout.num_running,
            tp_size=engine.tp_size,
            dp_size=engine.num_replicas,
            context_length=engine.model.context_length,
            vocab_size=engine.model.vocab_size,
            model_path=engine.model.path,
            is_in_stage=self._gate.is_in_stage,
            stop_token_ids=engine.model.stop_token_ids,
        )


def _bundles(samples: Sequence[types_pb2.Sample]) -> Iterator[list[types_pb2.Sample]]:
    """Groups as many samples as fit into one message."""
    bundle: list[types_pb2.Sample] = []
    num_tokens = 0
    for sample in in_parts(samples):
        bundle.append(sample)
        num_tokens += len(sample.token_ids) + _TOKENS_FOR_FIELDS + len(sample.routed_experts) // _TOKENS_FOR_FIELDS
        if num_tokens > _MAX_BUNDLE_TOKENS:
            yield bundle
            bundle, num_tokens = [], 0
    if bundle:
        yield bundle


_SERVICE = "tasuki.v1.RolloutService"
_POISON_GRACE_S = 0.2
_GRACE_S = 5.0
_log = logging.getLogger(__name__)


def serve(config: NodeConfig, model: ModelFacts, ranks: RankProcesses, deadline: StartupDeadline, start: StartSeconds) -> int:
    """Serves until told to stop (exit code 0) or until an engine rank dies (1)."""
    if config.rollout.has_engine_metrics:
        keep_metrics_in_memory()
    return uvloop.run(_serve(config, model, ranks, deadline, start))


async def _serve(
    config: NodeConfig, model: ModelFacts, ranks: RankProcesses, deadline: StartupDeadline, start: StartSeconds
) -> int:
    shutdown = Shutdown(ranks)
    tracer = open_service_tracer(config, service="rollout")
    target, port = paths.node_targets(config)["rollout"], port_of(config, "rollout")
    server = RpcServer(service="rollout", target=target, port=port, fleet=config.fleet, tracer=tracer)
    engine = start_engine(config, model, ranks, on_death=shutdown.on_death, on_stop=shutdown.stop.set)
    deadline.finish()
    start.end("engine", within=engine.reports[0].get("start_seconds", {}))
    configure_logging("rollout")  # SGLang has replaced ours
    _log_plans(engine.reports)
    socket_dir = paths.socket_dir(config.state_dir)
    staying = staying_tags(config, read_choices(config.state_dir), Service.ROLLOUT)
    rank_calls = RankCalls(engine.num_ranks, socket_dir=socket_dir, staying=staying)
    sync = WeightSync(rank_calls, socket_dir=socket_dir, num_replicas=config.dp_size)
    heartbeat = Heartbeat(config.state_dir, "rollout")
    numbers = CallNumbers(paths.socket_dir(config.state_dir) / "generate-calls", instance_id=read_instance(config.state_dir).id)
    try:
        rollout = Rollout(
            engine,
            sync,
            rank_calls,
            seeds=CallSeeds(config.seed, numbers),
            on_poison=shutdown.on_poison,
            on_serving=lambda is_serving: server.set_serving(f"{_SERVICE}/Generate", is_serving),
        )
        gate = CommandGate(Failpoints.of(config, "rollout"), boot_id=rollout.boot_id)
        metrics = GenerationMetrics(server.registry, num_gpus=len(set(gpus_of(config).rollout)))
        server.add(
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(rollout, gate, metrics=metrics), _SERVICE
        )
        memory = RolloutMemoryServicer(rollout, gate)
        server.add(memory_pb2_grpc.add_MemoryServiceServicer_to_server, memory, "tasuki.v1.MemoryService")
        server.metrics.refresh = EngineLoad(server.registry, rollout).refresh
        if config.rollout.has_engine_metrics:
            EngineMetrics(server.registry, paths.engine_metrics_dir(config.state_dir))
        ranks.watch(shutdown.on_death)
        await warm_up(engine, shutdown, timeout_s=config.coordinator.stage_timeout_s)
        start.end("first batches")
        await rollout.fall_asleep(timeout_s=config.coordinator.stage_timeout_s)
        start.end("falling asleep")
        start.tell(config.state_dir, "rollout")
        await server.start()
        heartbeat.beat_in_loop()
        await server.serve(shutdown.stop)
        # Running calls wait for an engine that is gone.
        await server.stop(grace_s=0.0 if shutdown.is_death else _GRACE_S)
    finally:
        ranks.unwatch()
        heartbeat.close()
        tracer.close()
        sync.close()
        rank_calls.close()
        engine.stop()
    if not shutdown.is_death:
        numbers.remove()
    return 1 if shutdown.is_death else 0


class Shutdown:
    """When the service stops serving, and whether because an engine rank died."""

    def __init__(self, ranks: RankProcesses) -> None:
        self.stop = asyncio.Event()
        self.is_death = False
        self._ranks = ranks

    def on_death(self) -> None:
        if not self.is_death:
            _log.error("event=engine_lost action=stop")
        self.is_death = True
        self.stop.set()
        self._ranks.unwatch()

    def on_poison(self) -> None:
        # Send the answer first; then the engine dies with this process, and the supervisor restarts both.
        asyncio.get_running_loop().call_later(_POISON_GRACE_S, self.on_death)


async def warm_up(engine: RolloutEngine, shutdown: Shutdown, *, timeout_s: float) -> None:
    """Runs the engine's first batches; a requested stop cuts them.

    Raises InternalError if a rank dies meanwhile, DeadlineExceeded after `timeout_s`, and what SGLang raises.
    """
    warming, stopping = asyncio.ensure_future(engine.warm_up()), asyncio.ensure_future(shutdown.stop.wait())
    done, _ = await asyncio.wait([warming, stopping], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if warming in done:
        warming.result()
        return
    warming.cancel()
    await asyncio.wait([warming])
    if shutdown.is_death:
        raise InternalError("an engine rank ended in its first batches")
    if not done:
        raise DeadlineExceeded(f"the first batches took longer than coordinator.stage_timeout_s = {timeout_s:g} s", rpc="start")


def _log_plans(reports: Sequence[RankReport]) -> None:
    """Says which ranks have recorded the plan of the first sync; the others do so then."""
    for rank, report in enumerate(reports):
        if problem := report.get("plan_problem"):
            _log.warning("event=plan_not_recorded rank=%d problem=%s", rank, problem)
    seconds = [parts["plan"] for report in reports if "plan" in (parts := report.get("start_seconds", {}))]
    if seconds:
        _log.info("event=plan_recorded ranks=%d seconds=%.3f", len(seconds), max(seconds))
