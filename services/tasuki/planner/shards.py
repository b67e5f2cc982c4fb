"""One FSDP2 rank's parts of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from tasuki.models.shape import ROUTER, Shapes
from tasuki.planner.layout import Layout


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
