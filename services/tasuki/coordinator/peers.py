"""Calls of the coordinator to trainer and rollout: one RPC for each stage and undo, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig
from tasuki.coordinator.journal import Intent, Outcome
from tasuki.coordinator.phases import lost_weights, ring_position
from tasuki.v1 import memory_pb2, metrics_pb2, rollout_pb2, trainer_pb2, types_pb2, weights_pb2
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.metrics_pb2_grpc import MetricsServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, StageOrder, from_rpc_error
from tasuki.wire.stages import RULES, Phase, Rpc, Service, Stage, Undo
from tasuki.wire.tracing import NO_TRACER, Tracer

_READ_TIMEOUT_S = 10.0
_USAGE_TIMEOUT_S = 2.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Observed:
    """State that both services report."""

    trainer_boot_id: str
    rollout_boot_id: str
    trainer_stage: Stage | None
    rollout_stage: Stage | None
    trainer_version: int | None = None
    served_version: int | None = None
    received_version: int | None = None
    """Version of the weights that rollout holds but does not serve yet."""
    poison: str = ""
    absent: tuple[Service, ...] = ()
    """Services that do not answer. They count as freshly started, as they will be."""
    in_stage: tuple[Service, ...] = ()
    """Services that still run a command of an earlier coordinator: their stage is not yet known."""

    def require_all(self) -> None:
        """Raises PeerUnavailable naming a service that does not answer or still runs a stage."""
        for service in self.absent:
            raise PeerUnavailable(f"{service} does not answer", peer=service)
        for service in self.in_stage:
            raise PeerUnavailable(f"{service} still carries out a stage that was cut off; try again", peer=service)

    @property
    def is_asleep(self) -> bool:
        """Whether rollout reports that it holds no memory."""
        return Service.ROLLOUT not in self.absent and self.rollout_stage in (None, Stage.PAUSE_WEIGHTS)

    def restarted_since(self, before: Observed) -> Service | None:
        """Service that is gone or was restarted since `before`; None if neither."""
        if self.trainer_boot_id != before.trainer_boot_id:
            return Service.TRAINER
        return Service.ROLLOUT if self.rollout_boot_id != before.rollout_boot_id else None

    @property
    def is_on_the_way_back(self) -> bool:
        """Whether the node can only go back: the publication is gone, or the trainer has trained since."""
        versions = {self.trainer_version, self.received_version} - {None}
        is_stale = self.rollout_stage is Stage.SYNC and len(versions) > 1
        return is_stale or lost_weights(trainer=self.trainer_stage, rollout=self.rollout_stage)

    def lacks(self, phase: Phase) -> Service | None:
        """Service that must come back before any step towards `phase`; None if none is missing.

        An engine takes its memory while the trainer is off the GPUs: the trainer leaves before it starts, and returns after it.
        A missing trainer is not waited for while rollout is awake, since it may need rollout's memory to start.
        """
        if Service.ROLLOUT in self.absent and (phase is Phase.ROLLOUT or self.trainer_stage is Stage.OFFLOAD):
            return None if self.trainer_is_in_the_way else Service.ROLLOUT
        if Service.TRAINER in self.absent and self.rollout_stage in (None, Stage.PAUSE_WEIGHTS):
            return Service.TRAINER
        return Service.ROLLOUT if self.poison and phase is Phase.ROLLOUT else None

    @property
    def trainer_is_in_the_way(self) -> bool:
        """Whether the trainer is on the GPUs that a starting engine needs."""
        is_resident = self.trainer_stage in (None, Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS)
        return Service.ROLLOUT in self.absent and Service.TRAINER not in self.absent and is_resident

    def place(self) -> Stage:
        """Stage that the node is at. Raises StageOrder if the two services contradict each other."""
        trainer, rollout = self.trainer_stage, self.rollout_stage
        at = ring_position(trainer=trainer, rollout=rollout)
        if at is None:
            text = f"trainer is at {trainer} and rollout at {rollout}, where no changeover leads; restart the node"
            raise StageOrder(text, trainer=trainer, rollout=rollout)
        return at


class Peers:
    """The two services of this node. Each call may raise TasukiError."""

    def __init__(
        self, targets: Mapping[str, str], config: CoordinatorConfig, *, epoch: int, tracer: Tracer = NO_TRACER
    ) -> None:
        """targets: by service. epoch: the coordinator's; a service whose state it has read refuses stage commands of older epochs."""
        self._channels = {service: tracer.link(open_channel(targets[service])) for service in Service}
        self._trainer = TrainerServiceStub(self._channels[Service.TRAINER])
        self._rollout = RolloutServiceStub(self._channels[Service.ROLLOUT])
        self._memory = {service: MemoryServiceStub(channel) for service, channel in self._channels.items()}
        self._metrics = {service: MetricsServiceStub(channel) for service, channel in self._channels.items()}
        self._epoch, self._timeout_s, self._drain_grace_s = epoch, config.stage_timeout_s, config.drain_grace_s

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def observe(self) -> Observed:
        """States of the services that answer."""
        trainer, rollout = await asyncio.gather(self._trainer_state(), self._rollout_state())
        return Observed(
            trainer_boot_id=trainer.boot_id,
            rollout_boot_id=rollout.boot_id,
            trainer_stage=Stage.of(trainer.stage),
            rollout_stage=Stage.of(rollout.stage),
            trainer_version=trainer.policy_version if trainer.boot_id else None,
            served_version=rollout.policy_version if rollout.HasField("policy_version") else None,
            received_version=rollout.received_version if rollout.HasField("received_version") else None,
            poison=(rollout.poison_reason or "unknown cause") if rollout.is_poisoned else "",
            absent=tuple(
                service for service, state in ((Service.TRAINER, trainer), (Service.ROLLOUT, rollout)) if not state.boot_id
            ),
            in_stage=tuple(
                service for service, state in ((Service.TRAINER, trainer), (Service.ROLLOUT, rollout)) if state.is_in_stage
            ),
        )

    async def _trainer_state(self) -> trainer_pb2.GetTrainerStateResponse:
        """State of the trainer; empty if it does not answer."""
        call = self._trainer.GetTrainerState(trainer_pb2.GetTrainerStateRequest(epoch=self._epoch), timeout=_READ_TIMEOUT_S)
        with suppress(PeerUnavailable, DeadlineExceeded):
            return await _answer(Service.TRAINER, call)
        return trainer_pb2.GetTrainerStateResponse()

    async def _rollout_state(self) -> rollout_pb2.GetRolloutStateResponse:
        """State of rollout; empty if it does not answer."""
        call = self._rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(epoch=self._epoch), timeout=_READ_TIMEOUT_S)
        with suppress(PeerUnavailable, DeadlineExceeded):
            return await _answer(Service.ROLLOUT, call)
        return rollout_pb2.GetRolloutStateResponse()

    async def usage(self, service: Service, *, skip_torch_cache: bool = False) -> GetUsageResponse:
        """Memory of the service's ranks by tag and device, and of the devices. Raises TasukiError, also if the ranks are busy."""
        request = memory_pb2.GetUsageRequest(skip_torch_cache=skip_torch_cache)
        call = self._memory[service].GetUsage(request, timeout=_USAGE_TIMEOUT_S)
        return await _answer(service, call)

    async def metrics(self, service: Service, *, timeout_s: float) -> bytes:
        """Metrics of the service in Prometheus' format. Raises TasukiError."""
        call = self._metrics[service].GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=timeout_s)
        return (await _answer(service, call)).text

    async def carry_out(self, intent: Intent, *, published: bytes) -> Outcome:
        """Runs the stage, or its undo. `published`: the answer of LOAD_WEIGHTS, which SYNC needs."""
        command = types_pb2.CommandId(epoch=intent.epoch, sequence=intent.sequence, request_id=intent.request_id)
        match RULES[intent.stage].undo if intent.is_undo else intent.stage:
            case Stage() as stage:
                pass
            case Undo.WITHDRAW_WEIGHTS:
                request = trainer_pb2.WithdrawWeightsRequest(command=command)
                await _answer(Service.TRAINER, self._trainer.WithdrawWeights(request, timeout=self._timeout_s))
                return Outcome()
            case Undo.WITH_EARLIER:
                return Outcome()
            case Undo.NEVER:
                raise AssertionError(f"{intent.stage} cannot be taken back")
        service, number, tags = RULES[stage].service, stage.number, [tag.number for tag in RULES[stage].named_tags]
        memory = self._memory[service]
        match RULES[stage].rpc:
            case Rpc.PUBLISH_WEIGHTS:
                return await self._publish(command)
            case Rpc.RECEIVE_WEIGHTS:
                return await self._receive(command, published)
            case Rpc.DRAIN:
                return await self._drain(command)
            case Rpc.PAUSE:
                # LOAD_TRAINER is undone by OFFLOAD only to let an engine start on the trainer's GPUs.
                makes_room = intent.is_undo and stage is Stage.OFFLOAD
                pause = memory_pb2.PauseRequest(command=command, stage=number, tags=tags, makes_room=makes_room)
                answer = await _answer(service, memory.Pause(pause, timeout=self._timeout_s))
                return Outcome(answer.released_bytes)
            case Rpc.RESUME:
                resume = memory_pb2.ResumeRequest(command=command, stage=number, tags=tags)
                answer = await _answer(service, memory.Resume(resume, timeout=self._timeout_s))
                return Outcome(answer.mapped_bytes)

    async def _publish(self, command: types_pb2.CommandId) -> Outcome:
        request = trainer_pb2.PublishWeightsRequest(command=command)
        answer = await _answer(Service.TRAINER, self._trainer.PublishWeights(request, timeout=self._timeout_s))
        weights = answer.weights
        return Outcome(answer.published_bytes, answer=weights.SerializeToString(), policy_version=weights.policy_version)

    async def _receive(self, command: types_pb2.CommandId, published: bytes) -> Outcome:
        request = rollout_pb2.ReceiveWeightsRequest(command=command, weights=weights_pb2.PublishedWeights.FromString(published))
        answer = await _answer(Service.ROLLOUT, self._rollout.ReceiveWeights(request, timeout=self._timeout_s))
        return Outcome(answer.copied_bytes, answer=answer.sums.SerializeToString(), policy_version=answer.policy_version)

    async def _drain(self, command: types_pb2.CommandId) -> Outcome:
        request = rollout_pb2.DrainRequest(command=command, grace_ms=round(1000 * self._drain_grace_s))
        await _answer(Service.ROLLOUT, self._rollout.Drain(request, timeout=self._timeout_s + self._drain_grace_s))
        return Outcome()


async def _answer(service: Service, call: Awaitable[_Answer]) -> _Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as rpc_error:
        error = from_rpc_error(rpc_error)
        if isinstance(error, PeerUnavailable):
            raise PeerUnavailable(f"{service} does not answer: {error.message}", peer=service) from rpc_error
        if isinstance(error, DeadlineExceeded):
            raise DeadlineExceeded(f"{service} did not answer in time: {error.message}", peer=service) from rpc_error
        raise error from rpc_error
