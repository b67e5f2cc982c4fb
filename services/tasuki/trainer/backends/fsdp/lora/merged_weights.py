"""Weights with their adapters merged, W + scaling B A, each rank's slice by itself, for publishing and exporting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split

from tasuki.trainer.backends.fsdp.lora.adapters import Adapter, adapted_parameters, family_of
from tasuki.trainer.modules.lora import merge_experts, row_norms
from tasuki.weights.checksum import MODULUS
from tasuki.weights.copies import ViewCopy, prepare_copies
from tasuki.weights.export import Place
from tasuki.weights.plan import whole

if TYPE_CHECKING:
    from tasuki.trainer.backends.fsdp.lora.merge_triton import MergeTable

_GROUP_BYTES = 32 << 20
"""Gathered bytes of A at a time."""
Factors = tuple[Tensor, Tensor]
"""The part of B and of A for a slice of a weight, in float32."""


def expert_merges(causal_lm: nn.Module) -> dict[str, Callable[[Sequence[Tensor]], None]]:
    """How to write this rank's rows of each adapted matrix of experts, merged, by the parameter's name."""
    return {
        name: partial(merge_experts, base=each.base.to_local(), a=each.a.to_local(), b=each.b.to_local(), scaling=each.scaling)
        for name, each in adapted_parameters(causal_lm).items()
        if each.base.dim() == 3
    }


@torch.no_grad()
def merged(weight: Adapter, dtype: torch.dtype) -> DTensor:
    """The merged weight, sharded like W, rounded once. Collective."""
    base, mesh, placements = weight.base.to_local(), weight.base.device_mesh, weight.base.placements
    local = torch.empty_like(base, dtype=dtype)
    if base.dim() == 3:
        merge_experts([local], base, weight.a.to_local(), weight.b.to_local(), scaling=weight.scaling)
    else:
        merge(local, base=base, factors=_cut(weight), scaling=weight.scaling, magnitude=_magnitude(weight))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.base.shape, stride=weight.base.stride())


def _is_split_by_rows(weight: Adapter) -> bool:
    """Whether each rank has rows of W and B, and a part of A, as FSDP2 splits them."""
    return all(each.placements == (Split(0),) for each in (weight.base, weight.a, weight.b))


def _magnitude(weight: Adapter) -> Tensor | None:
    return None if weight.magnitude is None else weight.magnitude.to_local()


class MergedWeights:
    """All adapted weights of a model but experts', to be published merged; implements tasuki.weights.export.Replaced.

    Merges a few layers at a time, with one collective for all of their A and, on a GPU, one kernel.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        adapted, checkpoint = adapted_parameters(causal_lm).values(), family_of(causal_lm).checkpoint
        weights = [replace(each, name=checkpoint.tensor(each.name)) for each in adapted if each.base.dim() == 2]
        self.by_name = {weight.name: weight for weight in weights}
        self.names = frozenset(weight.name for weight in weights if weight.base.to_local().numel())
        self._is_by_rows = all(map(_is_split_by_rows, weights))
        self._groups = _grouped(weights) if self._is_by_rows else [[weight] for weight in weights]
        self._tables: list[MergeTable | None] | None = None
        self._tables_for: list[int] = []

    @torch.no_grad()
    def fill(self, places: Mapping[str, Place]) -> Mapping[str, int]:
        """Writes this rank's slice of every weight, merged. Returns the checksums. Collective."""
        tables = self._prepared(places)
        if tables is None:
            return self._fill_one_by_one(places)
        sums = torch.zeros(len(self.by_name), dtype=torch.int64, device=next(iter(places.values())).held.device)
        for group, table in zip(self._groups, tables, strict=True):
            columns = _gathered(group)
            if table is not None:
                table.start(columns, sums, scaling=group[0].scaling)
        by_slot = zip(self.by_name, sums.tolist(), strict=True)
        return {name: value % MODULUS for name, value in by_slot if name in places}

    def _fill_one_by_one(self, places: Mapping[str, Place]) -> Mapping[str, int]:
        for group in self._groups:
            for weight, factors in zip(group, _split(group) if self._is_by_rows else map(_cut, group), strict=True):
                if weight.name in places:
                    held, base, magnitude = places[weight.name].held, weight.base.to_local(), _magnitude(weight)
                    merge(held, base=base, factors=factors, scaling=weight.scaling, magnitude=magnitude)
        return _sums(places)

    def _prepared(self, places: Mapping[str, Place]) -> "list[MergeTable | None] | None":
        """A table per group, without slices that only other ranks have; None if one kernel a group cannot write them."""
        addresses = [place.held.data_ptr() for place in places.values()]
        if addresses != self._tables_for:
            self._tables, self._tables_for = self._make_tables(places), addresses
        return self._tables

    def _make_tables(self, places: Mapping[str, Place]) -> "list[MergeTable | None] | None":
        has_magnitudes = any(weight.magnitude is not None for weight in self.by_name.values())
        if not self._is_by_rows or has_magnitudes or not any(place.held.is_cuda for place in places.values()):
            return None
        from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable

        slots = {name: slot for slot, name in enumerate(self.by_name)}
        tables: list[MergeTable | None] = []
        for group in self._groups:
            starts = accumulate((weight.a.shape[1] for weight in group), initial=0)
            merges = [
                Merge(place.held, weight.base.to_local(), weight.b.to_local(), start, place.where, slots[weight.name])
                for weight, start in zip(group, starts, strict=False)
                if (place := places.get(weight.name)) is not None
            ]
            if not all(each.is_possible for each in merges):
                return None
            tables.append(MergeTable(merges) if merges else None)
        return tables


def _sums(places: Mapping[str, Place]) -> Mapping[str, int]:
    views = [ViewCopy(held=place.held, where=place.where, slot=slot) for slot, place in enumerate(places.values())]
    if not views:
        return {}
    summed = prepare_copies(views, num_sums=len(views), device=views[0].held.device)
    summed.start()
    return dict(zip(places, summed.sums().tolist(), strict=True))


@torch.no_grad()
def merge(held: Tensor, *, base: Tensor, factors: Factors, scaling: float, magnitude: Tensor | None = None) -> None:
    """Writes a merged slice to `held`: summed in float32, rounded once. magnitude: DoRA's, of rows that are whole."""
    rows, columns = factors
    if magnitude is not None:
        factor = magnitude.to(base.dtype).float() / row_norms(base, columns, rows, scaling=scaling)
        at_once = max(1, _GROUP_BYTES // (4 * base.shape[1]))
        for first in range(0, len(held), at_once):
            some = slice(first, first + at_once)
            held[some] = torch.addmm(base[some].float(), rows[some], columns, alpha=scaling) * factor[some, None]
        return
    if held.is_cuda:
        from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable

        one = Merge(held, base, rows, 0, whole(tuple(held.shape)), 0)
        if one.is_possible:
            MergeTable([one]).start(columns, torch.zeros(1, dtype=torch.int64, device=held.device), scaling=scaling)
            return
    held.copy_(torch.addmm(base.float(), rows, columns, alpha=scaling))


def _grouped(weights: Sequence[Adapter]) -> list[list[Adapter]]:
    """Runs of weights of one rank and scaling whose A together have up to _GROUP_BYTES."""
    groups: list[list[Adapter]] = []
    num_bytes = 0
    for weight in weights:
        size = weight.a.numel() * weight.a.element_size()
        first = groups[-1][0] if groups else None
        is_alike = first is not None and (weight.a.shape[0], weight.scaling) == (first.a.shape[0], first.scaling)
        if not is_alike or num_bytes + size > _GROUP_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(weight)
        num_bytes += size
    return groups


def _gathered(group: Sequence[Adapter]) -> Tensor:
    """A of weights that are split by rows, side by side: [rank, all columns]. Collective."""
    rank, mesh = group[0].a.shape[0], group[0].a.device_mesh
    local_a = torch.cat([weight.a.to_local() for weight in group], dim=1)
    num_rows = -(-rank // mesh.size())  # the last ranks have fewer
    if local_a.shape[0] < num_rows:
        local_a = torch.cat([local_a, local_a.new_zeros(num_rows - local_a.shape[0], local_a.shape[1])])
    all_a = local_a.new_empty(mesh.size() * num_rows, local_a.shape[1])
    dist.all_gather_into_tensor(all_a, local_a, group=mesh.get_group())
    return all_a[:rank]


def _split(group: Sequence[Adapter]) -> Iterator[Factors]:
    """Factors of weights that are split by rows. Collective."""
    columns = _gathered(group).split([weight.a.shape[1] for weight in group], dim=1)
    return ((weight.b.to_local(), each) for weight, each in zip(group, columns, strict=True))


def _cut(weight: Adapter) -> Factors:
    """Factors of a weight that is split in any way. Collective."""
    return _cut_as(weight.base, weight.b, dim=0), _cut_as(weight.base, weight.a, dim=1)


def _cut_as(base: DTensor, factor: DTensor, *, dim: int) -> Tensor:
    """The part of an adapter's factor for this rank's slice of the weight: of its rows (dim 0) or columns (dim 1)."""
    placements = [placement if placement.is_shard(dim) else Replicate() for placement in base.placements]
    return factor.redistribute(placements=placements).to_local()
