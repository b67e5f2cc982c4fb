"""A trainer rank's slice of a checkpoint tensor, and the names of module parameters in a checkpoint."""

from dataclasses import dataclass

import torch

from tasuki.models.family import CheckpointNames
from tasuki.weights.manifest import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of the checkpoint tensor `name` at `offsets`, in the shape of `local`: rows, columns, or both.

    offsets: one per dimension of `global_shape`. local: a live view of the rank's master weights, read at every publish.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    keeps_dtype: bool = False
    """Whether it is published and exported in its own dtype."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.local.shape))


def checkpoint_shards(
    name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], local: torch.Tensor, *, names: CheckpointNames
) -> list[Shard]:
    """The shards, under checkpoint names, in the slice `local` at `offsets` of the module parameter `name`; none if it is empty.

    Usually the same slice. transformers 5 fuses experts, one row each (gate_up_proj [E, 2 I, H], gate first, and down_proj [E, H, I]),
    while a checkpoint has two-dimensional tensors per expert. names: of the model's family.
    """
    if local.numel() == 0:
        return []
    parts = names.fused(name)
    if not parts:
        return [Shard(names.tensor(name), global_shape, offsets, local)]
    shards: list[Shard] = []
    for index, expert in enumerate(local, start=offsets[0]):
        for part, shape, at, weight in _expert_parts(parts, global_shape[1:], offsets[1:], expert):
            shards.append(Shard(names.expert(name, index, part), shape, at, weight))
    return shards


_Part = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def _expert_parts(
    names: tuple[str, ...], shape: tuple[int, ...], offsets: tuple[int, ...], expert: torch.Tensor
) -> list[_Part]:
    """Name, shape, offsets and values of the tensors that a slice of a fused one overlaps."""
    num_rows = shape[0] // len(names)
    parts: list[_Part] = []
    for place, part in enumerate(names):
        start = max(0, offsets[0] - place * num_rows)
        skipped = place * num_rows + start - offsets[0]
        length = min(num_rows - start, expert.shape[0] - skipped)
        if length > 0:
            parts.append((part, (num_rows, *shape[1:]), (start, *offsets[1:]), expert.narrow(0, skipped, length)))
    return parts
