"""Bytes of one FSDP2 rank that stay through a step: weights, gradients, optimizer state, and what is published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from tasuki.memory.granularity import ALIGNMENT, CPU_MIN_TENSOR, arena_bytes, export_bytes, rounded_up
from tasuki.models.shape import ROUTER, Shapes
from tasuki.planner.layout import Layout, Part

Bytes = dict[Part, int]
_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 32
_SCALE_BYTES = 4


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
        Part.TRAINER_WEIGHTS: arena_bytes(tuple(weights), device=layout.device),
        Part.GRADIENTS: arena_bytes(tuple(trained), device=layout.device),
        Part.OPTIMIZER: 0 if layout.optimizer_on_host else arena_bytes(tuple(_moments(layout)), device=layout.device),
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
        return export_bytes(num_bytes, device=layout.device) if layout.device == "cpu" and num_bytes else 0
    published = shards(layout) if layout.merges_adapters else trained_shards(layout)
    tensors = (math.prod(shape) * layout.engine_bytes for shape in published)
    num_bytes = sum(rounded_up(size, ALIGNMENT) for size in tensors)
    return export_bytes(num_bytes, device=layout.device)


def shards(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Rank 0's part of every parameter, in order of creation. FSDP2 splits dim 0 and pads all ranks alike."""
    root, *layers = layout.model.units()
    embedding, *others = root.values()
    for shape in chain([embedding], *(layer.values() for layer in layers), others):
        yield (-(-shape[0] // layout.num_ranks), *shape[1:])


def trained_shards(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Shards with gradients: all of them, or those of adapters."""
    if layout.lora_rank is None:
        yield from shards(layout)
        return
    for layer in map(layout.model.layer, range(layout.model.num_layers)):
        for rows, columns in _linear_layers(layer, layout.lora_targets):
            yield (-(-layout.lora_rank // layout.num_ranks), columns)
            yield (-(-rows // layout.num_ranks), layout.lora_rank)


def _linear_layers(layer: Shapes, targets: tuple[str, ...] | None) -> Iterator[tuple[int, int]]:
    """Rows and columns of layers with an adapter."""
    for name, shape in layer.items():
        if targets is not None and not name.endswith(tuple(f".{target}.weight" for target in targets)):
            continue
        if len(shape) == 3:
            yield from [(shape[1], shape[2])] * shape[0]
        elif len(shape) == 2 and name != ROUTER:
            yield (shape[0], shape[1])


def moment_block(shape: Sequence[int]) -> int | None:
    """Elements of a row that share one scale in 8 bits, for a parameter of this shape; None if its moments are not quantized.

    That is the case for vectors and for matrices whose rows are not divisible by a block of 32.
    """
    if len(shape) < 2 or shape[0] == 1:
        return None
    block = math.gcd(shape[-1], _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


def moment_bytes(shape: Sequence[int], *, element_bytes: int, is_8bit: bool) -> list[int]:
    """Sizes of the tensors that hold both moments of a shard. element_bytes: of an unquantized element."""
    block, num_elements = moment_block(shape) if is_8bit else None, math.prod(shape)
    if block is None:
        return [num_elements * element_bytes] * 2
    return [num_elements, num_elements // block * _SCALE_BYTES] * 2
