"""Trainer and rollout in memory, behind the coordinator's peer boundary, with their own stage rules and failures on request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tasuki.coordinator.peers import Observed
from tasuki.coordinator.phases import RULES, Service, Stage
from tasuki.coordinator.records import Intent, Outcome
from tasuki.wire.errors import EnginePoisoned, StageOrder, TasukiError

_TRAINER = {(None, Stage.LOAD_WEIGHTS), (Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS), (Stage.LOAD_WEIGHTS, Stage.OFFLOAD)}
_TRAINER |= {(Stage.OFFLOAD, Stage.LOAD_TRAINER)}
_ROLLOUT = {(None, Stage.RESUME_WEIGHTS), (Stage.PAUSE_WEIGHTS, Stage.RESUME_WEIGHTS), (Stage.RESUME_WEIGHTS, Stage.SYNC)}
_ROLLOUT |= {(Stage.SYNC, Stage.RESUME_KV), (Stage.RESUME_KV, Stage.DRAIN), (Stage.DRAIN, Stage.PAUSE_KV)}
_ROLLOUT |= {(Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS)}
# Taking a stage back: the stages after which that is accepted, and what the service then says it completed last.
_UNDO: dict[Stage, tuple[set[Stage | None], Stage]] = {
    Stage.LOAD_WEIGHTS: ({Stage.LOAD_WEIGHTS, Stage.LOAD_TRAINER, None}, Stage.LOAD_TRAINER),
    Stage.OFFLOAD: ({Stage.OFFLOAD}, Stage.LOAD_TRAINER),
    Stage.RESUME_WEIGHTS: ({Stage.RESUME_WEIGHTS, Stage.SYNC, Stage.PAUSE_KV}, Stage.PAUSE_WEIGHTS),
    Stage.RESUME_KV: ({Stage.RESUME_KV}, Stage.PAUSE_KV),
    Stage.DRAIN: ({Stage.DRAIN, Stage.PAUSE_KV}, Stage.RESUME_KV),
}


@dataclass
class FakeServices:
    """`fail` maps a stage to the error it raises; `done_anyway` are those whose work is done before the error."""

    fail: dict[Stage, TasukiError] = field(default_factory=dict)
    fail_undo: dict[Stage, TasukiError] = field(default_factory=dict)
    done_anyway: set[Stage] = field(default_factory=set)
    poisons: set[Stage] = field(default_factory=set)
    stage: dict[Service, Stage | None] = field(default_factory=lambda: dict.fromkeys(Service))
    boot_id: dict[Service, str] = field(default_factory=lambda: {service: f"{service}-1" for service in Service})
    version: int = 0
    received: int | None = None
    served: int | None = None
    poison: str = ""
    asked: list[tuple[str, Stage]] = field(default_factory=list)
    commands: list[tuple[int, int]] = field(default_factory=list)
    before_stage: Callable[[Stage], Awaitable[None]] = lambda _: asyncio.sleep(0)

    async def observe(self) -> Observed:
        return Observed(
            trainer_boot_id=self.boot_id[Service.TRAINER],
            rollout_boot_id=self.boot_id[Service.ROLLOUT],
            trainer_stage=self.stage[Service.TRAINER],
            rollout_stage=self.stage[Service.ROLLOUT],
            served_version=self.served,
            poison=self.poison,
        )

    async def run(self, intent: Intent, *, published: bytes) -> Outcome:
        stage, service = intent.stage, RULES[intent.stage].service
        self.asked.append(("run", stage))
        self.commands.append((intent.epoch, intent.sequence))
        await self.before_stage(stage)
        if self.poison and service is Service.ROLLOUT and stage not in (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS):
            raise EnginePoisoned(self.poison)
        if (self.stage[service], stage) not in _TRAINER | _ROLLOUT:
            raise StageOrder(f"{service} cannot do {stage} after {self.stage[service]}")
        if stage in self.fail and stage not in self.done_anyway:
            self.poison = "planted" if stage in self.poisons else ""
            raise self.fail[stage]
        self.stage[service] = stage
        if stage is Stage.SYNC:
            self.received = int(published)
        if stage is Stage.RESUME_KV:
            self.served = self.received
        if stage is Stage.DRAIN:
            self.served = None
        if stage in self.fail:
            raise self.fail[stage]
        answer = str(self.version).encode() if stage is Stage.LOAD_WEIGHTS else b""
        return Outcome(num_bytes=100, answer=answer, policy_version=self.version if answer else None)

    async def undo(self, intent: Intent) -> Outcome:
        stage, service = intent.stage, RULES[intent.stage].service
        self.asked.append(("undo", stage))
        self.commands.append((intent.epoch, intent.sequence))
        if stage in self.fail_undo:
            raise self.fail_undo[stage]
        if stage in (Stage.SYNC, Stage.PAUSE_KV):
            return Outcome()
        accepted_after, leads_to = _UNDO[stage]
        if self.stage[service] not in accepted_after:
            raise StageOrder(f"{service} has nothing to take back after {self.stage[service]}")
        self.stage[service] = leads_to
        self.served = self.received if leads_to is Stage.RESUME_KV else None
        return Outcome()
