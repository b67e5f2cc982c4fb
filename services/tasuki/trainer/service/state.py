"""What the trainer's front knows of itself; its two servicers share it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tasuki.rpc.commands import CommandGate
from tasuki.trainer.stages import raise_unless_loaded
from tasuki.v1.types_pb2 import STAGE_UNSPECIFIED, Stage


@dataclass(slots=True)
class TrainerState:
    """Written only by who holds `turn`."""

    policy_version: int
    stage: Stage.ValueType = STAGE_UNSPECIFIED
    """The last stage that was completed."""
    published_version: int | None = None
    has_gradients: bool = False
    paused_tags: set[int] = field(default_factory=set)
    gate: CommandGate = field(default_factory=CommandGate)
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """A turn in which the trainer is loaded. Raises WrongPhase when it is not."""
        async with self.turn:
            raise_unless_loaded(self.stage)
            yield
