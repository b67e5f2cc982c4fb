"""Trainer and rollout without a model: the real command gate and stage rules, without any bytes."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tasuki.rollout.rollout import check_stage
from tasuki.rpc.commands import CommandGate, digest
from tasuki.trainer.service import state as trainer_stages
from tasuki.v1 import memory_pb2, rollout_pb2, trainer_pb2, weights_pb2
from tasuki.wire.errors import BadHandle, TasukiError, VersionOrder, WeightsCorrupt
from tasuki.wire.stages import Stage

Answer = TypeVar("Answer")


def stage_of(request: memory_pb2.PauseRequest | memory_pb2.ResumeRequest) -> Stage:
    stage = Stage.of(request.stage)
    assert stage is not None
    return stage


@dataclass
class Disk:
    """State that survives the trainer's lives: the optimizer steps in its log, by request id and in order."""

    steps: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Weather:
    """Fault inside a service, raised once before a stage is carried out. `seconds`: duration of each stage."""

    refusal: TasukiError | None = None
    hangs: bool = False
    corrupts: bool = False
    differs: int = 0
    seconds: float = 0.1
    is_stuck: bool = False

    async def __call__(self) -> None:
        self.is_stuck = self.hangs
        await asyncio.sleep(3600.0 if self.hangs else self.seconds)
        refusal, self.refusal, self.hangs = self.refusal, None, False
        if refusal is not None:
            raise refusal


class SimulatedService:
    """One life of a service. executed: how often it carried out each command."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.gate = CommandGate(boot_id=boot_id)
        self.weather = Weather()
        self.executed: Counter[str] = Counter()
        self.died = asyncio.Event()
        self.looked = 0
        """Epoch of the latest coordinator that has read the state."""

    def _look(self, epoch: int) -> None:
        self.gate.look(epoch)
        self.looked = max(self.looked, epoch)

    async def _stage(self, request: Any, act: Callable[[], Awaitable[Any]]) -> Any:
        return await self.gate.stage(request, self._counted(request, act))

    def _counted(self, request: Any, act: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        async def counted() -> Any:
            self.executed[request.command.request_id] += 1
            return await act()

        return counted


class SimulatedTrainer(SimulatedService):
    """Learns by counting steps. A new life continues from the disk."""

    def __init__(self, boot_id: str, disk: Disk) -> None:
        super().__init__(boot_id)
        self.stage: Stage | None = None
        self.published: int | None = None
        self._disk = disk
        for version, (request_id, content) in enumerate(disk.steps.items(), start=1):
            self.gate.restore(request_id, content=content, answer=trainer_pb2.OptimStepResponse(version=version))

    @property
    def version(self) -> int:
        return len(self._disk.steps)

    @property
    def is_resident(self) -> bool:
        return self.stage is not Stage.OFFLOAD

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        async def step() -> trainer_pb2.OptimStepResponse:
            trainer_stages.raise_unless_loaded(self.stage)
            await self.weather()
            if not self.died.is_set():
                assert request.command.request_id not in self._disk.steps, "a sample is trained twice"
                self._disk.steps[request.command.request_id] = digest(request)
            return trainer_pb2.OptimStepResponse(version=self.version)

        return await self.gate.once(request, self._counted(request, step))

    async def PublishWeights(self, request: trainer_pb2.PublishWeightsRequest) -> trainer_pb2.PublishWeightsResponse:
        async def publish() -> trainer_pb2.PublishWeightsResponse:
            trainer_stages.raise_unless_next(Stage.LOAD_WEIGHTS, after=self.stage)
            await self.weather()
            self.stage, self.published = Stage.LOAD_WEIGHTS, self.version
            weights = weights_pb2.PublishedWeights(policy_version=self.version, boot_id=self.boot_id)
            return trainer_pb2.PublishWeightsResponse(weights=weights, published_bytes=1000)

        return await self._stage(request, publish)

    async def WithdrawWeights(self, request: trainer_pb2.WithdrawWeightsRequest) -> trainer_pb2.WithdrawWeightsResponse:
        async def withdraw() -> trainer_pb2.WithdrawWeightsResponse:
            self.stage, self.published = trainer_stages.stage_after_withdrawal(self.stage), None
            return trainer_pb2.WithdrawWeightsResponse()

        return await self._stage(request, withdraw)

    async def Pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        return await self._stage(request, lambda: self._move(request, memory_pb2.PauseResponse(released_bytes=500)))

    async def Resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        return await self._stage(request, lambda: self._move(request, memory_pb2.ResumeResponse(mapped_bytes=500)))

    async def _move(self, request: Any, response: Answer) -> Answer:
        stage = stage_of(request)
        trainer_stages.raise_unless_next(stage, after=self.stage)
        await self.weather()
        self.stage = stage
        if stage is Stage.LOAD_TRAINER:
            self.published = None
        return response

    async def GetTrainerState(self, request: Any) -> trainer_pb2.GetTrainerStateResponse:
        self._look(request.epoch)
        return trainer_pb2.GetTrainerStateResponse(
            boot_id=self.boot_id,
            stage=self.stage.number if self.stage else None,
            policy_version=self.version,
            is_in_stage=self.gate.is_in_stage,
        )


class SimulatedRollout(SimulatedService):
    """Serves a number. trainer: the current one on the node, whose memory it reads."""

    def __init__(self, boot_id: str, trainer: Callable[[], SimulatedTrainer | None], on_served: Callable[[int], None]) -> None:
        super().__init__(boot_id)
        self.stage = None
        self.held: int | None = None
        self.flavour = 0
        """Non-zero for weights that differ from those of other nodes."""
        self.poison: str | None = None
        self._highest = 0
        self._trainer, self._on_served = trainer, on_served

    @property
    def is_resident(self) -> bool:
        return self.stage not in (None, Stage.PAUSE_WEIGHTS)

    @property
    def served(self) -> int | None:
        return self.held if self.stage in (Stage.RESUME_KV, Stage.DRAIN) else None

    async def ReceiveWeights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        async def receive() -> rollout_pb2.ReceiveWeightsResponse:
            check_stage(Stage.SYNC, after=self.stage, poison_reason=self.poison)
            weights, trainer = request.weights, self._trainer()
            if weights.policy_version < self._highest:
                raise VersionOrder("an older version was asked for")
            if trainer is None or (trainer.boot_id, trainer.published) != (weights.boot_id, weights.policy_version):
                raise BadHandle(f"version {weights.policy_version} of {weights.boot_id!r} is not published")
            await self.weather()
            if self.weather.corrupts:
                self.weather.corrupts, self.poison, self.held = False, "sync failed", None
                raise WeightsCorrupt("a bit is wrong")
            self.held, self.stage = weights.policy_version, Stage.SYNC
            self.flavour, self.weather.differs = self.weather.differs, 0
            sums = weights_pb2.WeightSums(
                policy_version=weights.policy_version, layout_digest=b"layout", checksums=[weights.policy_version, self.flavour]
            )
            return rollout_pb2.ReceiveWeightsResponse(policy_version=weights.policy_version, copied_bytes=1000, sums=sums)

        return await self._stage(request, receive)

    async def Drain(self, request: rollout_pb2.DrainRequest) -> rollout_pb2.DrainResponse:
        return await self._stage(request, lambda: self._move(Stage.DRAIN, rollout_pb2.DrainResponse()))

    async def Pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        response = memory_pb2.PauseResponse(released_bytes=500)
        return await self._stage(request, lambda: self._move(stage_of(request), response))

    async def Resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        response = memory_pb2.ResumeResponse(mapped_bytes=500)
        return await self._stage(request, lambda: self._move(stage_of(request), response))

    async def GetRolloutState(self, request: Any) -> rollout_pb2.GetRolloutStateResponse:
        self._look(request.epoch)
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=self.boot_id,
            stage=self.stage.number if self.stage else None,
            policy_version=self.served,
            received_version=self.held if self.served is None else None,
            is_poisoned=self.poison is not None,
            poison_reason=self.poison,
            is_in_stage=self.gate.is_in_stage,
        )

    async def _move(self, stage: Stage, response: Answer) -> Answer:
        check_stage(stage, after=self.stage, poison_reason=self.poison)
        await self.weather()
        self.stage = stage
        if stage is Stage.PAUSE_WEIGHTS:
            self.held = None
        if stage is Stage.RESUME_KV:
            assert self.held is not None, "a version is served that was never received"
            self._highest = self.held
            if not self.died.is_set():
                self._on_served(self.held)
        return response
