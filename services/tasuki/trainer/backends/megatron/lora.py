"""Adapters on megatron-core's linear layers, in the words of PEFT's for the layers of the checkpoint that each computes.

A column-parallel layer has all of A and its rows of B, a row-parallel one its columns of A and all of B. What a rank has whole is
multiplied by its part of the tokens alone, so its gradient is summed over tensor-parallel ranks, as norms' are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import ADAPTER_FILE, check_shared_a
from tasuki.models.shape import EXPERTS, ModelShape
from tasuki.trainer.backends.megatron.groups import Groups
from tasuki.trainer.backends.megatron.weights import Band, Part, bands_of
from tasuki.trainer.modules.experts import GroupedExperts
from tasuki.trainer.modules.lora import (
    EXPERT_A,
    EXPERT_B,
    Dropout,
    adapt_experts,
    from_file,
    in_file,
    initial_a,
    merge_experts,
    row_norms,
)


class Adapter(nn.Module):
    """A and B of one layer of megatron-core's. Added to its output by a hook of the layer."""

    def __init__(self, layer: Any, bands: Sequence[Band], lora: LoraConfig, groups: Groups, *, index: int) -> None:
        """bands: of the layer's weight. index: other layers have others."""
        super().__init__()
        self.is_adapted, self._groups, self._is_fused = True, groups, lora.is_fused
        self._splits_columns = isinstance(layer, RowParallelLinear)
        layers = {band.part: band.layer for band in bands}
        adapted = {part: layer for part, layer in layers.items() if lora.adapts(layer)}
        ranks = {part: lora.rank_of(layers[part]) if part in adapted else 0 for part in layers}
        places = torch.arange(len(layer.weight)).split([band.num_rows for band in bands])
        rows = {
            part: torch.cat([each for each, band in zip(places, bands, strict=True) if band.part == part]) for part in layers
        }
        sharing = ["+".join(adapted)] if self._is_fused else list(adapted)
        first = {names: names.partition("+")[0] for names in sharing}

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(layer.weight.new_empty(shape))

        self._shapes = {part: (len(rows[part]), ranks[part]) for part in layers}
        # From a dictionary they would be sorted.
        self.a = nn.ParameterDict([(names, new(ranks[part], layer.weight.shape[1])) for names, part in first.items()])
        self.b = nn.ParameterDict([(part, new(*self._shapes[part])) for part in adapted])
        self.magnitude = nn.ParameterDict([(part, new(len(rows[part]))) for part in adapted if lora.use_dora])
        scaling = [lora.scaling_of(adapted[part]) for part in first.values() for _ in range(ranks[part])]
        self.scaling_R = torch.tensor(scaling, device=groups.device)
        """float32, also of layers in bfloat16, which would round it."""
        self.order_O = torch.cat([*rows.values()]).argsort().to(groups.device)
        """Where each row of the layer is in its parts, one after the other."""
        drop = Dropout(lora.dropout, index) if lora.dropout else nn.Identity()
        self._before, self._after = (drop if lora.dropout_position == each else nn.Identity() for each in ("pre", "post"))

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [R, in] of all parts, and B [out, R] in the layer's order of rows, with zeros where a part does not have that A."""
        a, b = (
            [*self.a.values()],
            [self.b[name] if name in self.b else self._none(shape) for name, shape in self._shapes.items()],
        )
        joined = torch.cat(b) if self._is_fused else torch.block_diag(*b)
        return torch.cat(a), joined.index_select(0, self.order_O)

    def forward(self, layer: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """The layer's output with the adapters'. Norms of DoRA count as constants, as in its paper's section 4.3."""
        if not self.is_adapted:
            return output
        (x, *_), (result, bias), (a, b) = inputs, output, self.factors()
        dropped = self._before(x)
        scaled = (self._exchanged(linear(dropped, a)) * self.scaling_R).to(a.dtype)
        added = self._after(linear(scaled, b))
        if not self.magnitude:
            return result + added, bias
        factor = self.factor(layer, slice(None))
        kept = self._without_bias(layer, result if dropped is x else layer.forward(dropped)[0])
        return result + added + (factor - 1).to(result.dtype) * (kept + added), bias

    def factor(self, layer: Any, rows: slice) -> Tensor:
        """DoRA's factor of some rows, [out] float32. Collective over tensor-parallel ranks."""
        (a, b), magnitude = self.factors(), torch.cat([*self.magnitude.values()]).index_select(0, self.order_O)
        return magnitude[rows].float() / self._norms(layer.weight[rows], a, b[rows])

    @torch.no_grad()
    def merge(self, held: Sequence[Tensor], *, layer: Any, first_row: int) -> None:
        """Writes W + scaling B A to `held`, rows from `first_row` on: summed in float32, rounded once. Collective as `factor`."""
        a, b = (each.float() for each in self.factors())
        b = b * self.scaling_R
        for each in held:
            rows = slice(first_row, first_row := first_row + len(each))
            merged = torch.addmm(layer.weight[rows].float(), b[rows], a)
            each.copy_(merged * self.factor(layer, rows)[:, None] if self.magnitude else merged)

    @torch.no_grad()
    def initialize_magnitudes(self, layer: Any) -> None:
        """So that the policy equals the model. Collective over tensor-parallel ranks."""
        a, b = self.factors()
        norms = self._norms(layer.weight, a, torch.zeros_like(b))
        by_part = torch.empty_like(norms).index_copy_(0, self.order_O, norms)
        for name, values in zip(self.magnitude, by_part.split([rows for rows, _ in self._shapes.values()]), strict=True):
            self.magnitude[name].copy_(values)

    def _norms(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        over = self._groups.tensor if self._splits_columns and self._groups.tensor.size() > 1 else None
        return row_norms(base.detach(), a, b, scaling=self.scaling_R, columns_over=over)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """A's output: of all tokens, where B is split; summed for this rank's tokens, where A is."""
        group = self._groups.tensor
        if group.size() == 1:
            return inner
        if self._splits_columns:
            return reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=group)

    def _none(self, shape: tuple[int, int]) -> Tensor:
        return next(iter(self.b.values())).new_zeros(shape)

    @staticmethod
    def _without_bias(layer: Any, result: Tensor) -> Tensor:
        return result if layer.bias is None or layer.skip_bias_add else result - layer.bias


def add_adapters(network: nn.Module, model: ModelShape, lora: LoraConfig, groups: Groups) -> None:
    """Freezes a network on the meta device, and adds adapters."""
    network.requires_grad_(False)
    adapted = lora.layers(model)
    for index, (name, layer) in enumerate(list(network.named_modules())):
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            bands = bands_of(f"{name}.weight", model, rank=groups.tensor.rank(), size=groups.tensor.size())
            if any(band.layer in adapted for band in bands):
                layer.lora = Adapter(layer, bands, lora, groups, index=index)
                layer.register_forward_hook(layer.lora)
        if lora.experts and isinstance(layer, GroupedExperts):
            adapt_experts(layer, lora)


def adapters_of(network: nn.Module) -> Iterator[tuple[Any, Adapter]]:
    """Layers and their adapters, in the network's order."""
    for layer in network.modules():
        if isinstance(adapter := getattr(layer, "lora", None), Adapter):
            yield layer, adapter


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Disables the adapters in the block."""
    adapters = [module for module in network.modules() if isinstance(module, (Adapter, GroupedExperts))]
    for adapter in adapters:
        adapter.is_adapted = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_adapted = True


@torch.no_grad()
def fill_adapters(parts: Sequence[Part], lora: LoraConfig, model: ModelShape, *, seed: int) -> None:
    """First values of A, the same in every layout of ranks, or the adapters of PEFT's folder, which config.checks has judged.

    Raises as check_shared_a.
    """
    if lora.path is None:
        drawn, generator = dict[str, Tensor](), torch.Generator().manual_seed(seed)
        for name, shape in model.parameters().items():
            layer = name.removesuffix(".weight")
            if name.endswith(EXPERTS) and lora.experts:
                drawn[name + EXPERT_A] = initial_a((shape[0], lora.rank, shape[-1]), init=lora.init, generator=generator)
            elif layer in lora.layers(model):
                named = f"{layer}.lora_A.weight"
                drawn[named] = initial_a((lora.rank_of(layer), shape[-1]), init=lora.init, generator=generator)
        for part in parts:
            _fill(part, drawn)
        return
    if lora.is_fused:
        check_shared_a(lora.path / ADAPTER_FILE, lora.layers(model), lora)
    with safe_open(lora.path / ADAPTER_FILE, framework="pt") as file:
        for part in parts:
            stored: dict[str, Tensor] = {}
            for band in part.bands:
                named, _ = in_file(band.name, torch.empty(band.shape, device="meta"))
                stored[band.name] = from_file(band.name, file.get_tensor(named), band.shape)
            _fill(part, stored)


def _fill(part: Part, wholes: Mapping[str, Tensor]) -> None:
    for shard in part.shards(part.weights):
        if shard.name in wholes:
            shard.local.copy_(wholes[shard.name][tuple(map(slice, shard.offsets, shard.box.ends))])


def initialize_magnitudes(network: nn.Module, parts: Sequence[Part]) -> None:
    """DoRA's magnitudes of a policy that equals the model. Collective."""
    for layer, adapter in adapters_of(network):
        if adapter.magnitude:
            adapter.initialize_magnitudes(layer)
    for part in parts:
        if all(".lora_magnitude_vector." in band.name for band in part.bands):
            part.weights.copy_(part.own(part.buffer)[: len(part.weights)])


def merges(network: nn.Module) -> dict[nn.Parameter, Callable[..., None]]:
    """How to write rows of each adapted weight, merged, from `first_row` on. Experts' are counted one after another."""
    found: dict[nn.Parameter, Callable[..., None]] = {
        layer.weight: partial(adapter.merge, layer=layer) for layer, adapter in adapters_of(network)
    }
    for module in network.modules():
        if isinstance(module, GroupedExperts) and module.scaling is not None:
            for name in ("gate_up_proj", "down_proj"):
                weight, a, b = (getattr(module, name + end) for end in ("", EXPERT_A, EXPERT_B))
                found[weight] = partial(merge_experts, base=weight, a=a, b=b, scaling=module.scaling)
    return found
