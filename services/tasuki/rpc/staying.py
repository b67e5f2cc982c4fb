"""Tags of a service that stay mapped through a changeover, on every rank."""

from __future__ import annotations

from tasuki.config.schema import NodeConfig
from tasuki.wire.stages import MemoryTag, Service


def staying_of_engine_rank(config: NodeConfig, rank: int) -> frozenset[MemoryTag]:
    """Tags that one engine rank does not release: the planner's, and the base below adapters, which is never sent again."""
    names = frozenset[str]() if config.residency is None else config.residency.of_rollout(rank)
    base = [] if config.served_adapter is None else [MemoryTag.WEIGHTS]
    graphs = [MemoryTag.CUDA_GRAPH] if MemoryTag.KV_CACHE in names else []
    return frozenset([*(tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in names), *base, *graphs])


def staying_tags(config: NodeConfig, service: Service) -> frozenset[MemoryTag]:
    """Tags that every rank of the service keeps."""
    if service is Service.ROLLOUT:
        ranks = [staying_of_engine_rank(config, rank) for rank in range(config.num_engine_ranks)]
    else:
        residency = config.residency
        names = [
            frozenset[str]() if residency is None else residency.of_trainer(rank) for rank in range(config.trainer.num_ranks)
        ]
        ranks = [frozenset(tag for tag in MemoryTag if tag in each) for each in names]
    return frozenset.intersection(*ranks)
