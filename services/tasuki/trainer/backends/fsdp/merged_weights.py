"""Weights with their adapters merged, W + alpha / rank B A, each rank's slice by itself, for publishing and exporting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split

from tasuki.trainer.backends.fsdp.lora import adapted_parameters

_GROUP_BYTES = 32 << 20
"""Gathered bytes of A at a time."""
Write = Callable[[Tensor], object]


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
        columns = _cut_as(self.base, self.a, dim=1)
        local = self.base.to_local().to(dtype, copy=True)
        merge(local, self.base.to_local(), _Factors.of(_cut_as(self.base, self.b, dim=0), columns), scaling=self.scaling)
        mesh, placements = self.base.device_mesh, self.base.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=self.base.shape, stride=self.base.stride())


class MergedWeights:
    """All adapted weights of a model. Merges a few layers at a time, with one collective for all of their A."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self._weights = [AdaptedWeight(name, *given) for name, given in adapted_parameters(causal_lm).items()]
        is_by_rows = all(weight.is_split_by_rows for weight in self._weights)
        self._groups = _grouped(self._weights) if is_by_rows else [[weight] for weight in self._weights]
        self._gather = _gathered if is_by_rows else _cut

    @property
    def by_name(self) -> dict[str, AdaptedWeight]:
        return {weight.name: weight for weight in self._weights}

    @torch.no_grad()
    def writes(self) -> Iterator[tuple[str, Write]]:
        """Yields, for this rank's slice of every weight, a function that merges the adapter into a copy of the slice.

        Collective: every rank must exhaust it.
        """
        for group in self._groups:
            for weight, factors in zip(group, self._gather(group), strict=True):
                local = weight.base.to_local()
                if local.numel():
                    yield weight.name, partial(merge, base=local, factors=factors, scaling=weight.scaling)


@dataclass(frozen=True, slots=True)
class _Factors:
    """B and A of one slice: in float32 and, on a GPU, as bfloat16 matrices whose product is theirs to 16 bits."""

    rows: Tensor
    columns: Tensor
    halves: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> _Factors:
        return cls(rows, columns, (_row_halves(rows), _column_halves(columns)) if rows.is_cuda else None)


@torch.no_grad()
def merge(held: Tensor, base: Tensor, factors: _Factors, *, scaling: float) -> None:
    """Merges an adapter into `held`, which has `base` in its own dtype. Sums are float32, and rounded once.

    On a GPU, weights in bfloat16 take a single product, which reads and writes `held` once.
    """
    if factors.halves is not None and held.dtype == base.dtype == torch.bfloat16:
        held.addmm_(*factors.halves, alpha=scaling)
    else:
        held.copy_(torch.addmm(base.float(), factors.rows, factors.columns, alpha=scaling))


def _row_halves(rows: Tensor) -> Tensor:
    """[high, high, low] of B: with `_column_halves`, all but the product of the two low parts."""
    high, low = _halves(rows)
    return torch.cat([high, high, low], dim=1)


def _column_halves(columns: Tensor) -> Tensor:
    high, low = _halves(columns)
    return torch.cat([high, low, high], dim=0)


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 number, and the rest in bfloat16."""
    high = values.bfloat16()
    return high, (values - high).bfloat16()


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


def _gathered(group: Sequence[AdaptedWeight]) -> list[_Factors]:
    """Factors of weights that are split by rows, with one gather of A side by side."""
    rank, mesh = group[0].a.shape[0], group[0].a.device_mesh
    local_a = torch.cat([weight.a.to_local() for weight in group], dim=1)
    num_rows = -(-rank // mesh.size())  # the last ranks have fewer
    if local_a.shape[0] < num_rows:
        local_a = torch.cat([local_a, local_a.new_zeros(num_rows - local_a.shape[0], local_a.shape[1])])
    all_a = local_a.new_empty(mesh.size() * num_rows, local_a.shape[1])
    dist.all_gather_into_tensor(all_a, local_a, group=mesh.get_group())
    all_b = torch.cat([weight.b.to_local() for weight in group])
    all_factors = _Factors.of(all_b, all_a[:rank])
    row_sizes = [weight.b.to_local().shape[0] for weight in group]
    column_sizes = [weight.a.shape[1] for weight in group]
    rows, columns = all_factors.rows.split(row_sizes), all_factors.columns.split(column_sizes, dim=1)
    if all_factors.halves is None:
        return [_Factors(*each, None) for each in zip(rows, columns, strict=True)]
    halves = zip(all_factors.halves[0].split(row_sizes), all_factors.halves[1].split(column_sizes, dim=1), strict=True)
    return [_Factors(*each) for each in zip(rows, columns, halves, strict=True)]


def _cut(group: Sequence[AdaptedWeight]) -> list[_Factors]:
    """Factors of weights that are split in any way."""
    return [_Factors.of(_cut_as(weight.base, weight.b, dim=0), _cut_as(weight.base, weight.a, dim=1)) for weight in group]


def _cut_as(base: DTensor, factor: DTensor, *, dim: int) -> Tensor:
    """The part of an adapter's factor for this rank's slice of the weight: of its rows (dim 0) or columns (dim 1)."""
    placements = [placement if placement.is_shard(dim) else Replicate() for placement in base.placements]
    return factor.redistribute(placements=placements).to_local()
