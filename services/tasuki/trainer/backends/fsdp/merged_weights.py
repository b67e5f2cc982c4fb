"""Weights with their adapters merged, W + alpha / rank B A, each rank's slice by itself, for publishing and exporting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split

from tasuki.trainer.backends.fsdp.lora import adapted_parameters
from tasuki.transport.export import Write

_GROUP_BYTES = 32 << 20
"""Gathered bytes of A at a time."""
Factors = tuple[Tensor, Tensor]
"""The part of B and of A for a slice of a weight, in float32."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A sharded weight W [out, in] and its adapter, A [rank, in] and B [out, rank]. They keep their memory for the life of the process."""

    name: str
    base: DTensor
    a: DTensor
    b: DTensor
    scaling: float

    @property
    def is_split_by_rows(self) -> bool:
        """Whether each rank has rows of W and B, and a part of A, as FSDP2 splits them."""
        return all(each.placements == (Split(0),) for each in (self.base, self.a, self.b))

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> DTensor:
        """The merged weight, sharded like W, rounded once. Collective."""
        local = torch.empty_like(self.base.to_local(), dtype=dtype)
        merge(local, base=self.base.to_local(), factors=_cut([self])[0], scaling=self.scaling)
        mesh, placements = self.base.device_mesh, self.base.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=self.base.shape, stride=self.base.stride())


class MergedWeights:
    """All adapted weights of a model, to be published merged; implements tasuki.transport.export.Replaced.

    Merges a few layers at a time, with one collective for all of their A.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        weights = [AdaptedWeight(name, *given) for name, given in adapted_parameters(causal_lm).items()]
        self.by_name = {weight.name: weight for weight in weights}
        is_by_rows = all(weight.is_split_by_rows for weight in weights)
        self._groups = _grouped(weights) if is_by_rows else [[weight] for weight in weights]
        self._gather = _gathered if is_by_rows else _cut

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, weight in self.by_name.items() if weight.base.to_local().numel())

    @torch.no_grad()
    def writes(self) -> Iterator[tuple[str, Write]]:
        """Yields, for this rank's slice of every weight, a function that writes it merged.

        Collective: every rank must exhaust it.
        """
        for group in self._groups:
            for weight, factors in zip(group, self._gather(group), strict=True):
                base = weight.base.to_local()
                if base.numel():
                    yield weight.name, partial(merge, base=base, factors=factors, scaling=weight.scaling)


@torch.no_grad()
def merge(held: Tensor, *, base: Tensor, factors: Factors, scaling: float) -> None:
    """Writes a merged slice to `held`: summed in float32, rounded once."""
    rows, columns = factors
    if held.is_cuda and held.dtype == base.dtype == torch.bfloat16:
        from tasuki.trainer.backends.fsdp.merge_triton import merge_on_gpu

        merge_on_gpu(held, base, rows, columns, scaling=scaling)
    else:
        held.copy_(torch.addmm(base.float(), rows, columns, alpha=scaling))


def _grouped(weights: Sequence[AdaptedWeight]) -> list[list[AdaptedWeight]]:
    """Runs of weights of one rank whose A together have up to _GROUP_BYTES."""
    groups: list[list[AdaptedWeight]] = []
    num_bytes = 0
    for weight in weights:
        size = weight.a.numel() * weight.a.element_size()
        if not groups or num_bytes + size > _GROUP_BYTES or weight.a.shape[0] != groups[-1][0].a.shape[0]:
            groups.append([])
            num_bytes = 0
        groups[-1].append(weight)
        num_bytes += size
    return groups


def _gathered(group: Sequence[AdaptedWeight]) -> list[Factors]:
    """Factors of weights that are split by rows, with one gather of A side by side."""
    rank, mesh = group[0].a.shape[0], group[0].a.device_mesh
    local_a = torch.cat([weight.a.to_local() for weight in group], dim=1)
    num_rows = -(-rank // mesh.size())  # the last ranks have fewer
    if local_a.shape[0] < num_rows:
        local_a = torch.cat([local_a, local_a.new_zeros(num_rows - local_a.shape[0], local_a.shape[1])])
    all_a = local_a.new_empty(mesh.size() * num_rows, local_a.shape[1])
    dist.all_gather_into_tensor(all_a, local_a, group=mesh.get_group())
    columns = all_a[:rank].split([weight.a.shape[1] for weight in group], dim=1)
    return [(weight.b.to_local(), each) for weight, each in zip(group, columns, strict=True)]


def _cut(group: Sequence[AdaptedWeight]) -> list[Factors]:
    """Factors of weights that are split in any way."""
    return [(_cut_as(weight.base, weight.b, dim=0), _cut_as(weight.base, weight.a, dim=1)) for weight in group]


def _cut_as(base: DTensor, factor: DTensor, *, dim: int) -> Tensor:
    """The part of an adapter's factor for this rank's slice of the weight: of its rows (dim 0) or columns (dim 1)."""
    placements = [placement if placement.is_shard(dim) else Replicate() for placement in base.placements]
    return factor.redistribute(placements=placements).to_local()
