"""What the trainer's front knows of itself; its two servicers share it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tasuki.memory.stages import Stage
from tasuki.rpc.commands import CommandGate
from tasuki.trainer.stages import raise_unless_loaded


@dataclass(slots=True)
class TrainerState:
    """Written only by who holds `turn`."""

    policy_version: int
    stage: Stage | None = None
    """The last stage that was completed; None after a start."""
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
