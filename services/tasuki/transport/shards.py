"""A trainer rank's part of one checkpoint tensor, and the names under which module parameters appear in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [row_start, row_start + local.shape[0]) of the checkpoint tensor `name` of shape `global_shape`.

    local: a live, contiguous view of the rank's master weights; read anew at every publish.
    """

    name: str
    global_shape: tuple[int, ...]
    row_start: int
    local: torch.Tensor


def checkpoint_shards(name: str, global_shape: tuple[int, ...], row_start: int, local: torch.Tensor) -> list[Shard]:
    """The checkpoint-named shards in rows [row_start, ...) of the module parameter `name`; none when there are no rows.

    The same name and rows, but for the experts of Qwen3-MoE: transformers 5 keeps them fused, one row an expert
    (gate_up_proj [E, 2 I, H], gate first, and down_proj [E, H, I]), while a checkpoint has two-dimensional tensors for each expert.
    """
    if local.shape[0] == 0:
        return []
    prefix, experts, fused = name.rpartition(_EXPERTS)
    if not experts or fused not in ("gate_up_proj", "down_proj"):
        return [Shard(name, global_shape, row_start, local)]
    shards: list[Shard] = []
    for index, expert in enumerate(local, start=row_start):
        for part, weight in _expert_parts(fused, expert):
            shards.append(Shard(f"{prefix}{experts}{index}.{part}.weight", tuple(weight.shape), 0, weight))
    return shards


def _expert_parts(fused: str, expert: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if fused == "down_proj":
        return [("down_proj", expert)]
    gate, up = expert.chunk(2)
    return [("gate_proj", gate), ("up_proj", up)]
