"""A trainer rank's part of one checkpoint tensor, and the names under which module parameters appear in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.models.checkpoint import CheckpointNames


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [row_start, row_start + local.shape[0]) of the checkpoint tensor `name` of shape `global_shape`.

    local: a live, contiguous view of the rank's master weights; read anew at every publish.
    """

    name: str
    global_shape: tuple[int, ...]
    row_start: int
    local: torch.Tensor


def checkpoint_shards(
    name: str, global_shape: tuple[int, ...], row_start: int, local: torch.Tensor, *, names: CheckpointNames
) -> list[Shard]:
    """The checkpoint-named shards in rows [row_start, ...) of the module parameter `name`; none when there are no rows.

    The same rows, but for experts: transformers 5 keeps them fused, one row an expert (gate_up_proj [E, 2 I, H], gate first, and down_proj
    [E, H, I]), while a checkpoint has two-dimensional tensors for each expert. names: of the model's family.
    """
    if local.shape[0] == 0:
        return []
    parts = names.fused(name)
    if not parts:
        return [Shard(names.tensor(name), global_shape, row_start, local)]
    return [
        Shard(names.expert(name, index, part), tuple(weight.shape), 0, weight)
        for index, expert in enumerate(local, start=row_start)
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True)
    ]
