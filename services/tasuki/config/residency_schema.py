"""Residency: memory that stays mapped during the other phase, as the planner decided and the configuration records."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveInt

from tasuki.config.table import Schema

TrainerMemory = Literal["weights", "gradients", "optimizer", "export", "cache"]
EngineMemory = Literal["weights", "kv_cache"]


def _named_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names one of them twice")
    return names


TrainerNames = Annotated[tuple[TrainerMemory, ...], AfterValidator(_named_once)]
EngineNames = Annotated[tuple[EngineMemory, ...], AfterValidator(_named_once)]


class ResidencyConfig(Schema):
    """Tags that stay mapped on each rank's device during a changeover. An empty table keeps none; without one the planner decides."""

    trainer: tuple[TrainerNames, ...] = ()
    """Tags of each rank. "export" is the copy that rollout reads; "cache" is the memory cached by torch. Missing ranks keep nothing."""
    rollout: tuple[EngineNames, ...] = ()
    """Tags of each engine rank, ordered by replica. CUDA graphs follow "kv_cache"."""
    kv_tokens: PositiveInt | None = None
    """Tokens in a replica's KV cache, derived from `rollout.kv_tokens`; by default the engine sizes it at start."""
    starts_together: bool = False
    """Whether the trainer need not wait at the node's start until the engine sleeps: every GPU has room for both. A trainer that is
    restarted waits. On a CPU only a shared base makes it wait."""

    def of_trainer(self, rank: int) -> frozenset[str]:
        """Tags that stay on one trainer rank."""
        return frozenset(self.trainer[rank]) if rank < len(self.trainer) else frozenset()

    def of_rollout(self, rank: int) -> frozenset[str]:
        """Tags that stay on one engine rank, numbered over all replicas."""
        return frozenset(self.rollout[rank]) if rank < len(self.rollout) else frozenset()
