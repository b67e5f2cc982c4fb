"""Parameters of megatron-core's layers as slices of checkpoint tensors, for loading, publishing, saving and exporting.

It fuses queries, keys and values by group of heads, and gates with ups. Each is still a run of whole rows, so nothing is gathered.
Experts are as in transformers' module, each rank's whole.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tasuki.models.shape import ModelShape
from tasuki.trainer.backends.megatron.groups import Groups
from tasuki.weights.export import Shard

_LAYER = re.compile(r"decoder\.(layers\.\d+\.)(.+)\.(weight|bias)")
_ROOT = {
    "embedding.weight": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_ROWS = {"embedding.weight", "head"}
_NAMES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.gate": "mlp.gate",
    "mlp.linear_fc2": "mlp.down_proj",
}
_COLUMNS = {"self_attention.linear_proj", "mlp.linear_fc2"}
IN_EXPERTS = ".mlp.experts."
_ADAPTER = re.compile(r"(.+)\.lora\.(a|b|magnitude)\.([\w+]+)")
_KINDS = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive rows of a parameter that are rows, or parts of them, of one tensor; of an expert in a tensor [E, rows, columns]."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Of the first row."""
    num_rows: int

    @property
    def layer(self) -> str:
        """Name of the tensor's layer."""
        return self.name.rpartition(".")[0]

    @property
    def part(self) -> str:
        """Its last part, as in `q_proj`."""
        return self.layer.rpartition(".")[2]


def bands_of(name: str, model: ModelShape, *, shape: Sequence[int] = (), rank: int, size: int) -> list[Band]:
    """The bands of a parameter, in order. name: in the module `Policy`. rank, size: of the group that splits it.

    shape: of the parameter, for those of experts and adapters.
    """
    shapes = model.parameters()
    if IN_EXPERTS in name:
        tensor, num = f"model.{name.removeprefix('decoder.')}", shape[0]
        return [
            Band(tensor, (num * size, *shape[1:]), (expert, 0, 0), shape[1]) for expert in range(rank * num, (rank + 1) * num)
        ]
    if (found := _ADAPTER.fullmatch(name)) is not None:
        layer, kind, parts = found.groups()
        by_part = {band.part: band for band in reversed(bands_of(f"{layer}.weight", model, rank=rank, size=size))}
        return [_adapter_band(by_part[part], kind, shape) for part in parts.split("+")]

    def rows(tensor: str, *, first: int, num: int) -> Band:
        shape = shapes[tensor]
        return Band(tensor, shape, (first, *(0,) * (len(shape) - 1)), num)

    def even(tensor: str) -> Band:
        num = shapes[tensor][0] // size
        return rows(tensor, first=rank * num, num=num)

    if name in _ROWS:
        return [even(_ROOT[name])]
    if name in _ROOT:
        return [rows(_ROOT[name], first=0, num=shapes[_ROOT[name]][0])]
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    layer, module, kind = f"model.{found[1]}", found[2], found[3]
    if module == "self_attention.linear_qkv":
        heads, num_groups = model.num_heads // model.num_kv_heads, model.num_kv_heads // size
        sizes = {"q": heads * model.head_dim, "k": model.head_dim, "v": model.head_dim}
        return [
            rows(f"{layer}self_attn.{each}_proj.{kind}", first=group * num, num=num)
            for group in range(rank * num_groups, (rank + 1) * num_groups)
            for each, num in sizes.items()
        ]
    if module == "mlp.linear_fc1":
        return [even(f"{layer}mlp.{each}_proj.{kind}") for each in ("gate", "up")]
    tensor = f"{layer}{_NAMES[module]}.{kind}"
    if module in _COLUMNS:
        num_rows, num_columns = shapes[tensor]
        return [Band(tensor, shapes[tensor], (0, rank * num_columns // size), num_rows)]
    return [rows(tensor, first=0, num=shapes[tensor][0])]


def _adapter_band(base: Band, kind: str, shape: Sequence[int]) -> Band:
    """All of a layer's A, B or magnitudes in a parameter of this shape. base: the first of the layer's weight."""
    (rows, columns), (row, column) = base.shape, base.offsets
    whole = {"a": (shape[0], columns), "b": (rows, shape[-1]), "magnitude": (rows,)}[kind]
    offsets = {"a": (0, column), "b": (row, 0), "magnitude": (row,)}[kind]
    return Band(f"{base.layer}.{_KINDS[kind]}.weight", whole, offsets, shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A parameter of one rank, by rows: those of experts one after another. Ranks that have the same one each step some, and gather the
    others'."""

    parameter: nn.Parameter
    """[R, ...], of experts [e, R / e, ...], in compute dtype: the first rows of `buffer`."""
    buffer: Tensor
    """[D C, ...]: C rows for each of D ranks."""
    first: int
    """This rank's first row."""
    weights: Tensor
    """[c, ...] in the dtype of the optimizer: this rank's rows, at most C. A view of `buffer` if that has the same dtype."""
    bands: Sequence[Band]
    """Cover its rows in order, and again for each further tensor that is tied in them."""
    is_shared: bool
    """Whether every tensor-parallel rank has all of it, and sees a part of its gradient: norms, routers, A or B of adapters."""

    data: dist.ProcessGroup
    """Ranks that have the same parameter, with other tokens."""

    def whole(self, buffer: Tensor) -> Tensor:
        """What `parameter` is of `buffer`, of another of its shape."""
        return buffer[: self.num_rows].view_as(self.parameter)

    @property
    def num_rows(self) -> int:
        return self.parameter.numel() // self.buffer[0].numel()

    def own(self, buffer: Tensor) -> Tensor:
        """[C, ...]: this rank's part of `buffer`, or of another of its shape."""
        return buffer.narrow(0, self.first, len(buffer) // self.data.size())

    def shards(self, rows: Tensor) -> list[Shard]:
        """Slices of the model's tensors in `rows`, one for each of `weights`."""
        shards: list[Shard] = []
        start = 0
        for band in self.bands:
            low, high = max(start, self.first), min(start + band.num_rows, self.first + len(rows))
            if low < high:
                local, (first, *others) = rows[low - self.first : high - self.first], band.offsets
                if len(band.shape) == 3:
                    shards.append(Shard(band.name, band.shape, (first, low - start, 0), local.unsqueeze(0)))
                else:
                    shards.append(Shard(band.name, band.shape, (first + low - start, *others), local))
            start = (start + band.num_rows) % self.num_rows
        return shards


def make_parts(
    network: nn.Module, model: ModelShape, groups: Groups, *, dtype: torch.dtype, region: AbstractContextManager[None]
) -> list[Part]:
    """Allocates the parameters of a network on the meta device, zeros. dtype: of what the optimizer steps; what is frozen keeps its own."""
    parts: list[Part] = []
    with region:
        for name, meta in list(network.named_parameters()):
            is_expert = IN_EXPERTS in name
            split = groups.experts.get_group() if is_expert else groups.tensor
            data = groups.same_experts if is_expert else groups.data
            local = meta.to_local() if isinstance(meta, DTensor) else meta
            rows = local.flatten(0, 1) if is_expert else local
            num_rows, own = len(rows), -(-len(rows) // data.size())
            buffer = torch.zeros((own * data.size(), *rows.shape[1:]), dtype=meta.dtype, device=groups.device)
            first = own * data.rank()
            weights = buffer[first : min(first + own, num_rows)]
            if meta.requires_grad and dtype != meta.dtype:
                weights = torch.zeros_like(weights, dtype=dtype)
            parameter = nn.Parameter(buffer[:num_rows].view(local.shape), requires_grad=meta.requires_grad)
            owner, _, attribute = name.rpartition(".")
            network.get_submodule(owner).register_parameter(attribute, parameter)
            bands = bands_of(name, model, shape=local.shape, rank=split.rank(), size=split.size())
            is_whole = all((*local.shape, num_rows) == (*band.shape, band.num_rows) for band in bands)
            parts.append(Part(parameter, buffer, first, weights, bands, split.size() > 1 and not is_expert and is_whole, data))
    return parts


@torch.no_grad()
def gather_weights(parts: Iterable[Part]) -> None:
    """Rounds what each rank has stepped or loaded to compute dtype, and gives it to the others. Collective."""
    for part in parts:
        own = part.own(part.buffer)
        if part.weights.dtype != own.dtype:
            own[: len(part.weights)].copy_(part.weights)
        if part.data.size() > 1:
            # A copy, since gloo does not gather in place.
            dist.all_gather_into_tensor(part.buffer, own.clone(), group=part.data)
