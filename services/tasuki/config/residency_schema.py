"""What stays mapped while the other service works: the planner's decision, as a node's configuration carries it."""

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
    """What stays on each rank's device over a changeover. An empty table: nothing does. Without it `tasuki up` has the planner decide."""

    trainer: tuple[TrainerNames, ...] = ()
    """For each rank; "export" is what rollout reads, "cache" the working memory that torch holds on to. Ranks that are left out keep
    nothing."""
    rollout: tuple[EngineNames, ...] = ()
    """For each engine rank, those of the first replica first. CUDA graphs go with "kv_cache"."""
    kv_tokens: PositiveInt | None = None
    """Tokens in a replica's KV cache, as `rollout.kv_tokens` led to them; by default the engine sizes it when it starts."""

    def of_trainer(self, rank: int) -> frozenset[str]:
        """What stays on one trainer rank."""
        return frozenset(self.trainer[rank]) if rank < len(self.trainer) else frozenset()

    def of_rollout(self, rank: int) -> frozenset[str]:
        """What stays on one engine rank, counted over all replicas."""
        return frozenset(self.rollout[rank]) if rank < len(self.rollout) else frozenset()
