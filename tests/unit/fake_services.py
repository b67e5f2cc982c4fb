"""Trainer and rollout in memory, behind the coordinator's peer boundary, with the services' stage rules and failures on request."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tasuki.coordinator.journal import Intent, Outcome
from tasuki.coordinator.phases import Observed
from tasuki.rollout.rollout import check_stage
from tasuki.trainer.service.state import raise_unless_next
from tasuki.v1.weights_pb2 import LoadedCheckpoint, PublishedWeights
from tasuki.wire.errors import PeerUnavailable, StageOrder, TasukiError
from tasuki.wire.stages import RULES, Service, Stage

# Undo of a stage: the stages after which it is accepted, and the stage then reported as completed last.
_UNDO: dict[Stage, tuple[set[Stage | None], Stage]] = {
    Stage.LOAD_WEIGHTS: ({Stage.LOAD_WEIGHTS, Stage.LOAD_TRAINER, None}, Stage.LOAD_TRAINER),
    Stage.OFFLOAD: ({Stage.OFFLOAD}, Stage.LOAD_TRAINER),
    Stage.LOAD_TRAINER: ({Stage.LOAD_TRAINER, None}, Stage.OFFLOAD),
    Stage.RESUME_WEIGHTS: ({Stage.RESUME_WEIGHTS, Stage.SYNC, Stage.PAUSE_KV}, Stage.PAUSE_WEIGHTS),
    Stage.RESUME_KV: ({Stage.RESUME_KV}, Stage.PAUSE_KV),
    Stage.DRAIN: ({Stage.DRAIN, Stage.PAUSE_KV}, Stage.RESUME_KV),
}


@dataclass
class FakeServices:
    """`fail` maps a stage to the error that it raises; `fail_once` raises only the first time. Stages in `done_anyway` do their work before
    the error.
    """

    fail_once: dict[Stage, TasukiError] = field(default_factory=dict)
    fail: dict[Stage, TasukiError] = field(default_factory=dict)
    fail_undo_once: dict[Stage, TasukiError] = field(default_factory=dict)
    fail_undo: dict[Stage, TasukiError] = field(default_factory=dict)
    done_anyway: set[Stage] = field(default_factory=set)
    poisons: set[Stage] = field(default_factory=set)
    stage: dict[Service, Stage | None] = field(default_factory=lambda: dict.fromkeys(Service))
    boot_id: dict[Service, str] = field(default_factory=lambda: {service: f"{service}-1" for service in Service})
    version: int = 0
    loaded: LoadedCheckpoint | None = None
    received: int | None = None
    served: int | None = None
    poison: str = ""
    asked: list[tuple[str, Stage]] = field(default_factory=list)
    commands: list[tuple[int, int]] = field(default_factory=list)
    absent: set[Service] = field(default_factory=set)
    restarts: list[Service] = field(default_factory=list)
    before_stage: Callable[[Stage], Awaitable[None]] = lambda _: asyncio.sleep(0)
    outlives_callers: bool = False
    running: list[asyncio.Task[Outcome]] = field(default_factory=list)
    """Stages that continue without their callers."""

    async def observe(self) -> Observed:
        boot_id = {service: "" if service in self.absent else self.boot_id[service] for service in Service}
        stage = {service: None if service in self.absent else self.stage[service] for service in Service}
        return Observed(
            trainer_boot_id=boot_id[Service.TRAINER],
            rollout_boot_id=boot_id[Service.ROLLOUT],
            trainer_stage=stage[Service.TRAINER],
            rollout_stage=stage[Service.ROLLOUT],
            served_version=self.served,
            poison=self.poison,
            absent=tuple(self.absent),
            in_stage=tuple(Service(task.get_name()) for task in self.running if not task.done()),
        )

    def kill(self, service: Service) -> None:
        """Kills the service; its state is lost."""
        self.absent.add(service)
        self.stage[service] = None
        if service is Service.ROLLOUT:
            self.poison, self.received, self.served = "", None, None

    def start(self, service: Service) -> None:
        """Starts the service again."""
        self.absent.discard(service)
        self.boot_id[service] += "'"

    def restart(self, service: Service, cause: str) -> None:
        """Restarts the service, as the supervisor does on request."""
        self.restarts.append(service)
        self.kill(service)
        self.start(service)

    async def carry_out(self, intent: Intent, *, published: bytes) -> Outcome:
        if intent.is_undo:
            return await self._undo(intent)
        if not self.outlives_callers:
            return await self._run(intent, published)
        task = asyncio.create_task(self._run(intent, published), name=RULES[intent.stage].service)
        self.running.append(task)
        return await asyncio.shield(task)

    async def _run(self, intent: Intent, published: bytes) -> Outcome:
        stage, service = intent.stage, RULES[intent.stage].service
        self.asked.append(("run", stage))
        self.commands.append((intent.epoch, intent.sequence))
        await self.before_stage(stage)
        self._require(service)
        if service is Service.ROLLOUT:
            check_stage(stage, after=self.stage[service], poison_reason=self.poison or None)
        else:
            raise_unless_next(stage, after=self.stage[service])
        error = self.fail_once.pop(stage, self.fail.get(stage))
        if error is not None and stage not in self.done_anyway:
            self.poison = "planted" if stage in self.poisons else ""
            raise error
        self.stage[service] = stage
        if stage is Stage.SYNC:
            self.received = PublishedWeights.FromString(published).policy_version
        if stage is Stage.RESUME_KV:
            self.served = self.received
        if stage is Stage.DRAIN:
            self.served = None
        if error is not None:
            raise error
        if stage is not Stage.LOAD_WEIGHTS:
            return Outcome(num_bytes=100)
        weights = PublishedWeights(policy_version=self.version, boot_id=self.boot_id[service], loaded=self.loaded)
        return Outcome(num_bytes=100, answer=weights.SerializeToString(), policy_version=self.version)

    async def _undo(self, intent: Intent) -> Outcome:
        stage, service = intent.stage, RULES[intent.stage].service
        self.asked.append(("undo", stage))
        self.commands.append((intent.epoch, intent.sequence))
        self._require(service)
        error = self.fail_undo_once.pop(stage, self.fail_undo.get(stage))
        if error is not None:
            raise error
        if stage in (Stage.SYNC, Stage.PAUSE_KV):
            return Outcome()
        accepted_after, leads_to = _UNDO[stage]
        if self.stage[service] not in accepted_after:
            raise StageOrder(f"{service} has nothing to take back after {self.stage[service]}")
        self.stage[service] = leads_to
        self.served = self.received if leads_to is Stage.RESUME_KV else None
        return Outcome()

    def _require(self, service: Service) -> None:
        if service in self.absent:
            raise PeerUnavailable(f"{service} does not answer", peer=service)
