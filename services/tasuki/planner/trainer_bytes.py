"""Bytes of one FSDP2 rank that stay through a step: weights, gradients, optimizer state, and what is published."""

from __future__ import annotations

import math

from tasuki.memory.granularity import ALIGNMENT, CPU_MIN_TENSOR, rounded_up
from tasuki.planner.arenas import published_bytes, tag_bytes
from tasuki.planner.layout import Layout, Part
from tasuki.planner.moments import moment_bytes
from tasuki.planner.shards import shards, trained_shards

Bytes = dict[Part, int]


def trainer_tags(layout: Layout) -> Bytes:
    """Weights, gradients and optimizer state of rank 0, which has the most: of the policy and, if there is one, the critic."""
    weights, trained = _kept_tensors(layout)
    critic = layout.of_critic()
    if critic is not None:
        critic_weights, critic_trained = _kept_tensors(critic)
        weights, trained = weights + critic_weights, trained + critic_trained
    if _has_reference_shards(layout) and not layout.reference_on_host:
        weights += _frozen_shards(layout)
    return {
        Part.TRAINER_WEIGHTS: tag_bytes(layout, weights),
        Part.GRADIENTS: tag_bytes(layout, trained),
        Part.OPTIMIZER: 0 if layout.optimizer_on_host else tag_bytes(layout, _moments(layout)),
    }


def frozen_bytes(layout: Layout) -> int:
    """Bytes of rank 0's weights that no step changes: bases of adapters, and a reference. Without an arena's rounding."""
    frozen = [network for network in (layout, layout.of_critic()) if network is not None and network.lora_rank is not None]
    num_bytes = sum(sum(_frozen_shards(network)) for network in frozen if not network.shares_base)
    return num_bytes + (
        sum(_frozen_shards(layout)) if layout.has_reference and not layout.reference_on_host and layout.lora_rank is None else 0
    )


def gradient_bytes(layout: Layout) -> int:
    """Gradients of rank 0, of all trained networks, without an arena's rounding."""
    critic = layout.of_critic()
    return sum(size for network in (layout, critic) if network is not None for size in _kept_tensors(network)[1])


def host_moments(layout: Layout) -> int:
    """Host memory of one rank for optimizer state that stays there."""
    return sum(rounded_up(size, ALIGNMENT) for size in _moments(layout)) if layout.optimizer_on_host else 0


def host_reference(layout: Layout) -> int:
    """Host memory of one rank for a reference that stays there. Scoring with it takes less of a GPU than a step."""
    if not (_has_reference_shards(layout) and layout.reference_on_host):
        return 0
    return sum(rounded_up(size, ALIGNMENT) for size in _frozen_shards(layout))


def _has_reference_shards(layout: Layout) -> bool:
    return layout.has_reference and layout.lora_rank is None


def _moments(layout: Layout) -> list[int]:
    """Sizes of AdamW's state tensors, of all trained networks."""
    critic = layout.of_critic()
    return [
        size
        for network in (layout, critic)
        if network is not None
        for shape in trained_shards(network)
        for size in moment_bytes(shape, element_bytes=layout.param_bytes, is_8bit=layout.optimizer_8bit)
    ]


def _kept_tensors(layout: Layout) -> tuple[list[int], list[int]]:
    """Sizes of a network's shards, and of those that are trained."""
    trained = [math.prod(shape) * layout.param_bytes for shape in trained_shards(layout)]
    if layout.lora_rank is not None:
        return ([] if layout.shares_base else _frozen_shards(layout)) + trained, trained
    weights = list(trained)
    if layout.model.is_tied and layout.device == "cuda":
        # `to_empty` allocates a tied tensor once per name; torch keeps the first allocation in the tag's pool.
        weights.append(weights[0])
    return weights, trained


def _frozen_shards(layout: Layout) -> list[int]:
    return [math.prod(shape) * layout.compute_bytes for shape in shards(layout)]


def export_arena(layout: Layout) -> int:
    """Copies of rank 0's weights for the engine, or the bucket that they pass through."""
    if layout.sync_bucket_bytes is not None:
        return layout.sync_bucket_bytes
    if layout.exports_parameters:
        # On a CPU, tensors too small for the arena of the weights are copied, in whole chunks.
        small = [size for size in (math.prod(shape) * layout.engine_bytes for shape in shards(layout)) if size < CPU_MIN_TENSOR]
        num_bytes = sum(rounded_up(size, ALIGNMENT) for size in small)
        return published_bytes(layout, num_bytes) if layout.device == "cpu" and num_bytes else 0
    published = shards(layout) if layout.merges_adapters else trained_shards(layout)
    tensors = (math.prod(shape) * layout.engine_bytes for shape in published)
    num_bytes = sum(rounded_up(size, ALIGNMENT) for size in tensors)
    return published_bytes(layout, num_bytes)
