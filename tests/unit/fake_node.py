"""The real coordinator over services in memory, and helpers for requests to it."""

import asyncio

from tasuki.coordinator.admission import Admission
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.operations import Operation
from tasuki.coordinator.phases import path
from tasuki.v1.coordinator_pb2 import StageEvent
from tasuki.wire.stages import HOLDS, Phase, Stage
from tests.unit.fake_services import FakeServices

TRAIN, ROLLOUT = HOLDS[Phase.TRAIN], HOLDS[Phase.ROLLOUT]
TO_ROLLOUT, TO_TRAIN = path(TRAIN, Phase.ROLLOUT), path(ROLLOUT, Phase.TRAIN)


def make_node(
    journal: Journal, services: FakeServices, *, admission: Admission | None = None, recovery_timeout_s: float = 0.3
) -> Node:
    """recovery_timeout_s: the default is for tests that wait for its end."""
    return Node(
        journal,
        services,
        boot_id="boot-1",
        trainer_target="unix:/t",
        rollout_target="unix:/r",
        restart=services.restart,
        recovery_timeout_s=recovery_timeout_s,
        admission=admission,
    )


async def events(operation: Operation) -> list[StageEvent]:
    return [told.event async for told in operation.follow()]


async def acquire(node: Node, phase: Phase, request_id: str = "") -> list[StageEvent]:
    return await events(node.acquire(phase, request_id or f"to {phase} {len(node._begun)}"))


class Hold:
    """Keeps a stage running until `release` is set; `reached` is set when it begins."""

    def __init__(self, services: FakeServices, stage: Stage) -> None:
        self.reached, self.release = asyncio.Event(), asyncio.Event()
        self._stage = stage
        services.before_stage = self._wait

    async def _wait(self, stage: Stage) -> None:
        if stage is self._stage:
            self.reached.set()
            await self.release.wait()
