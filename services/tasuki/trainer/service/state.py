"""State of the trainer's front, shared by its two servicers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tasuki.rpc.commands import CommandGate
from tasuki.trainer.ranks.wire import ROLES
from tasuki.trainer.roles import Role
from tasuki.trainer.stages import raise_unless_loaded
from tasuki.v1.trainer_pb2 import RoleState
from tasuki.wire.stages import MemoryTag, Stage


@dataclass(slots=True)
class TrainerState:
    """Only the holder of `turn` may write it."""

    roles: dict[Role, RoleState]
    """State of every trained role."""
    stage: Stage | None = None
    """The last completed stage; None after a start."""
    published_version: int | None = None
    paused_tags: set[MemoryTag] = field(default_factory=set[MemoryTag])
    gate: CommandGate = field(default_factory=CommandGate)
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def policy_version(self) -> int:
        return self.roles[Role.POLICY].version

    @property
    def has_gradients(self) -> bool:
        """Whether any role has gradients."""
        return any(state.has_gradients for state in self.roles.values())

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """A turn in which the trainer is loaded. Raises WrongPhase if it is not."""
        async with self.turn:
            raise_unless_loaded(self.stage)
            yield


def roles_by_name(states: Sequence[RoleState]) -> dict[Role, RoleState]:
    """Role states as reported by the ranks."""
    return {ROLES[state.role]: state for state in states}
