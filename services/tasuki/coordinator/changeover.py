"""One changeover: intent, RPC and result for each stage; if one fails, the finished ones are undone."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig
from tasuki.coordinator.journal import Intent, Journal, Outcome, timestamp
from tasuki.coordinator.memory_record import TAKES
from tasuki.coordinator.phases import Observed, advance, path, since_phase, turns_back, undo_path
from tasuki.v1 import memory_pb2, metrics_pb2, rollout_pb2, trainer_pb2, types_pb2, weights_pb2
from tasuki.v1.coordinator_pb2 import StageEvent
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.metrics_pb2_grpc import MetricsServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import (
    DeadlineExceeded,
    DiskFull,
    InternalError,
    Interrupted,
    PeerUnavailable,
    StageOrder,
    StaleEpoch,
    StaleSequence,
    TasukiError,
    from_rpc_error,
)
from tasuki.wire.stages import RULES, Phase, Rpc, Service, Stage, StageStatus, Undo
from tasuki.wire.tracing import CHANGEOVER_ID, NO_TRACER, REQUEST_ID, Span, SpanKind, Tracer, current, spanning

if TYPE_CHECKING:
    from tasuki.coordinator.admission import Admission

_log = logging.getLogger("tasuki.coordinator")
_READ_TIMEOUT_S = 10.0
_USAGE_TIMEOUT_S = 2.0
_Answer = TypeVar("_Answer")
# After these errors the stage may be done, running or never begun. It is not sent again, but its undo is: a service runs commands one
# at a time in order, so the undo finds the stage finished, or is refused because it never began. DiskFull does not say which write
# failed, the intent or the result.
_OUTCOME_UNKNOWN = (DeadlineExceeded, DiskFull, InternalError, PeerUnavailable)

Tell = Callable[[StageEvent, Stage], None]
"""Takes what happened, and where the node is after it."""
Done = Callable[..., StageEvent]
"""Records a result, as `Journal.done` does."""
Restart = Callable[[Service, str], None]
"""Kills and restarts a service that hangs; takes the cause."""


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
        asked = trainer_pb2.GetTrainerStateRequest(epoch=self._epoch), rollout_pb2.GetRolloutStateRequest(epoch=self._epoch)
        trainer, rollout = await asyncio.gather(
            _state(Service.TRAINER, self._trainer.GetTrainerState(asked[0], timeout=_READ_TIMEOUT_S)),
            _state(Service.ROLLOUT, self._rollout.GetRolloutState(asked[1], timeout=_READ_TIMEOUT_S)),
        )
        trainer, rollout = trainer or trainer_pb2.GetTrainerStateResponse(), rollout or rollout_pb2.GetRolloutStateResponse()
        states = ((Service.TRAINER, trainer), (Service.ROLLOUT, rollout))
        return Observed(
            trainer_boot_id=trainer.boot_id,
            rollout_boot_id=rollout.boot_id,
            trainer_stage=Stage.of(trainer.stage),
            rollout_stage=Stage.of(rollout.stage),
            trainer_version=trainer.policy_version if trainer.boot_id else None,
            served_version=rollout.policy_version if rollout.HasField("policy_version") else None,
            received_version=rollout.received_version if rollout.HasField("received_version") else None,
            poison=(rollout.poison_reason or "unknown cause") if rollout.is_poisoned else "",
            absent=tuple(service for service, state in states if not state.boot_id),
            in_stage=tuple(service for service, state in states if state.is_in_stage),
        )

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
                withdraw = trainer_pb2.WithdrawWeightsRequest(command=command)
                await _answer(Service.TRAINER, self._trainer.WithdrawWeights(withdraw, timeout=self._timeout_s))
                return Outcome()
            case Undo.WITH_EARLIER:
                return Outcome()
            case Undo.NEVER:
                raise AssertionError(f"{intent.stage} cannot be taken back")
        service, number, tags = RULES[stage].service, stage.number, [tag.number for tag in RULES[stage].named_tags]
        memory, timeout_s = self._memory[service], self._timeout_s
        match RULES[stage].rpc:
            case Rpc.PUBLISH_WEIGHTS:
                publish = trainer_pb2.PublishWeightsRequest(command=command)
                published_now = await _answer(service, self._trainer.PublishWeights(publish, timeout=timeout_s))
                weights = published_now.weights
                return Outcome(published_now.published_bytes, weights.SerializeToString(), weights.policy_version)
            case Rpc.RECEIVE_WEIGHTS:
                weights = weights_pb2.PublishedWeights.FromString(published)
                receive = rollout_pb2.ReceiveWeightsRequest(command=command, weights=weights)
                received = await _answer(service, self._rollout.ReceiveWeights(receive, timeout=timeout_s))
                return Outcome(received.copied_bytes, received.sums.SerializeToString(), received.policy_version)
            case Rpc.DRAIN:
                drain = rollout_pb2.DrainRequest(command=command, grace_ms=round(1000 * self._drain_grace_s))
                await _answer(service, self._rollout.Drain(drain, timeout=timeout_s + self._drain_grace_s))
                return Outcome()
            case Rpc.PAUSE:
                # LOAD_TRAINER is undone by OFFLOAD only to let an engine start on the trainer's GPUs.
                makes_room = intent.is_undo and stage is Stage.OFFLOAD
                pause = memory_pb2.PauseRequest(command=command, stage=number, tags=tags, makes_room=makes_room)
                return Outcome((await _answer(service, memory.Pause(pause, timeout=timeout_s))).released_bytes)
            case Rpc.RESUME:
                resume = memory_pb2.ResumeRequest(command=command, stage=number, tags=tags)
                return Outcome((await _answer(service, memory.Resume(resume, timeout=timeout_s))).mapped_bytes)


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


async def _state(service: Service, call: Awaitable[_Answer]) -> _Answer | None:
    """State of a service; None if it does not answer."""
    with suppress(PeerUnavailable, DeadlineExceeded):
        return await _answer(service, call)
    return None


class ChangeoverTrace:
    """Span of a changeover, child of the call that requested it."""

    def __init__(self, tracer: Tracer, *, changeover_id: str, target: Phase, request_id: str) -> None:
        self._tracer, self._changeover_id = tracer, changeover_id
        attributes = {REQUEST_ID: request_id, CHANGEOVER_ID: changeover_id}
        self._span = tracer.begin(f"changeover to {target}", kind=SpanKind.INTERNAL, attributes=attributes)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Makes calls in the block children of the changeover."""
        with current(self._span):
            yield

    @contextmanager
    def stage(self, intent: Intent) -> Iterator[Span]:
        """Span of a stage, or of its undo; parent of the calls in the block."""
        name = f"undo {intent.stage}" if intent.is_undo else f"stage {intent.stage}"
        attributes = {REQUEST_ID: intent.request_id, CHANGEOVER_ID: self._changeover_id}
        with self.around(), spanning(self._tracer.begin(name, kind=SpanKind.INTERNAL, attributes=attributes)) as span:
            yield span

    def end(self, error: TasukiError | None) -> None:
        if error is not None:
            self._span.fail(error.reason)
        self._span.end()


NO_TRACE = ChangeoverTrace(NO_TRACER, changeover_id="", target=Phase.TRAIN, request_id="")


class Changeover:
    """Runs the stages of one changeover. `at` is the stage that the node is at."""

    def __init__(
        self,
        changeover_id: str,
        target: Phase,
        *,
        seen: Observed,
        journal: Journal,
        peers: Peers,
        tell: Tell,
        restart: Restart,
        admission: "Admission | None" = None,
        trace: ChangeoverTrace = NO_TRACE,
    ) -> None:
        """admission: None admits every stage."""
        self.id, self.target, self.trace = changeover_id, target, trace
        self.started = time.perf_counter()
        self._journal, self._peers, self._tell, self._restart = journal, peers, tell, restart
        self._admission = admission
        self._unreported: list[StageEvent] = []
        self.observe(seen)

    def observe(self, seen: Observed) -> None:
        """Adopts the state that the services report. Raises StageOrder if they contradict each other."""
        self.at = seen.place()
        self._is_on_the_way_back = seen.is_on_the_way_back
        self._boots = {"trainer_boot_id": seen.trainer_boot_id, "rollout_boot_id": seen.rollout_boot_id}

    def knows(self, seen: Observed) -> bool:
        """Whether both services are still in the lives that were last observed."""
        return (*self._boots.values(),) == (seen.trainer_boot_id, seen.rollout_boot_id)

    async def bring_to_target(self) -> None:
        """Brings the node to `target`. If a stage fails, the finished ones are undone and its error is raised."""
        # SYNC may be still to come while no coordinator learned the answer of LOAD_WEIGHTS.
        lacks_publication = (
            self.at in (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS) and self._journal.last(Stage.LOAD_WEIGHTS) is None
        )
        if self._is_on_the_way_back or lacks_publication or turns_back(self.at, self.target):
            await self._take_back(since_phase(self.at))
        stages = path(self.at, self.target)
        for stage, following in zip_longest(stages, stages[1:]):
            finished = since_phase(self.at)
            # Otherwise the next intent, or the changeover's outcome, is recorded without a wait for the services' memory.
            waits = following in TAKES
            try:
                await self.run(stage, done=self._journal.done if waits else self._journal.done_before_next)
            except TasukiError as error:
                if isinstance(error, DeadlineExceeded):
                    self._restart(RULES[stage].service, f"{stage} did not end in time: {error.message}")
                suspect = (stage,) if isinstance(error, _OUTCOME_UNKNOWN) else ()
                try:
                    await self._take_back((*finished, *suspect))
                except TasukiError as failed:
                    _log.error("event=undo_failed changeover=%s cause=%s reason=%s", self.id, error.reason, failed.reason)
                raise

    async def make_room(self) -> None:
        """Undoes LOAD_TRAINER, so that an engine can start on the trainer's GPUs.

        Raises GradientsPending, and Interrupted once the trainer has left: `target` then takes another changeover.
        """
        await self._take_back((Stage.LOAD_TRAINER, *since_phase(self.at)))
        raise Interrupted(f"rollout was lost; it comes back before phase {self.target} is reached")

    async def run(self, stage: Stage, *, done: Done) -> None:
        """Runs one stage. Raises its error, and StageOrder if another stage must come first.

        Raises OutOfGpuMemory, with nothing recorded or sent, if the stage has no room.
        """
        after = advance(self.at, stage)
        published = self._journal.last(Stage.LOAD_WEIGHTS) if stage is Stage.SYNC else Outcome()
        if published is None:
            text = "the answer of LOAD_WEIGHTS was lost with an earlier coordinator; acquire phase TRAIN, which takes it back"
            raise StageOrder(text, stage=stage, after=self.at)
        if self._admission is not None:
            await self._admission.admit(stage, trainer_boot_id=self._boots["trainer_boot_id"])
        intent = self._intend(stage, is_undo=False)
        self._tell(started_event(intent), self.at)
        await self._carry_out(intent, published=published.answer, leads_to=after, done=done)

    async def _take_back(self, stages: Sequence[Stage]) -> None:
        """Undoes `stages`, given in the order they ran, and observes the services afterwards."""
        for stage in undo_path(stages):
            intent = self._intend(stage, is_undo=True)
            try:
                await self._carry_out(intent, published=b"", leads_to=self.at, done=self._journal.done)
            except StageOrder:
                # The stage never ran; or rollout went on after it was observed, and the trainer must not return beside it.
                if stage is Stage.RESUME_WEIGHTS and not (await self._peers.observe()).is_asleep:
                    raise
        seen = await self._peers.observe()
        for service in seen.absent:
            if self._boots[f"{service}_boot_id"]:  # it counts as freshly started, but may still hold all its memory
                raise PeerUnavailable(f"{service} does not say where it is after the undo", peer=service)
        self.observe(seen)

    def _intend(self, stage: Stage, *, is_undo: bool) -> Intent:
        intent = self._journal.intend(stage, self.id, is_undo=is_undo, **self._boots)
        self.report()
        return intent

    async def _carry_out(self, intent: Intent, *, published: bytes, leads_to: Stage, done: Done) -> None:
        """Sends the command of an intent, and records its result."""
        started = time.perf_counter()
        try:
            with self.trace.stage(intent) as span:
                outcome = await self._peers.carry_out(intent, published=published)
                span.set("tasuki.bytes", outcome.num_bytes)
        except TasukiError as error:
            self._unreported.append(self._journal.failed(intent, error, seconds=time.perf_counter() - started))
            self.report()
            if isinstance(error, StaleSequence):
                self._journal.pass_over(int(error.metadata["current_sequence"]))
            if isinstance(error, StaleEpoch) and not self._journal.has_epoch(int(error.metadata["current_epoch"])):
                # No coordinator ever had this epoch, so none can continue from it; only a restart of the service clears it.
                self._restart(
                    RULES[intent.stage].service, f"it takes stages of an epoch that no coordinator had: {error.message}"
                )
            raise
        self.at = leads_to
        self._unreported.append(done(intent, outcome, seconds=time.perf_counter() - started))
        if self._journal.is_on_disk:
            self.report()

    def report(self) -> None:
        """Reports the results that are on disk by now."""
        while self._unreported:
            event = self._unreported.pop(0)
            log_stage(event)
            self._tell(event, self.at)


def log_stage(event: StageEvent) -> None:
    text = "event=stage changeover=%s stage=%s status=%s seconds=%.4f bytes=%d reason=%s"
    names, reason = (Stage.of(event.stage), StageStatus.of(event.status)), event.error_reason or "-"
    _log.info(text, event.changeover_id, *names, event.seconds, event.bytes, reason)


def started_event(intent: Intent) -> StageEvent:
    status = StageStatus.STARTED.number
    return StageEvent(changeover_id=intent.changeover_id, stage=intent.stage.number, status=status, time=timestamp(intent.time))
