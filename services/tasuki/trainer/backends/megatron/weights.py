"""Parameters of megatron-core's layers as slices of checkpoint tensors, for loading, publishing, saving and exporting.

It fuses queries, keys and values by group of heads, and gates with ups. Each is still a run of whole rows, so nothing is gathered.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    "mlp.linear_fc2": "mlp.down_proj",
}
_COLUMNS = {"self_attention.linear_proj", "mlp.linear_fc2"}


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive rows of a parameter that are rows, or parts of them, of one checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole checkpoint tensor."""
    offsets: tuple[int, ...]
    """Of the first row."""
    num_rows: int


def bands_of(name: str, model: ModelShape, *, rank: int, size: int) -> list[Band]:
    """The bands of one tensor-parallel rank's parameter, in order. name: in the module `Policy`."""
    shapes = model.parameters()

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


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A parameter of one tensor-parallel rank. Data-parallel ranks each step some of its rows, and gather the others'."""

    parameter: nn.Parameter
    """[R, ...] in compute dtype: the first rows of `buffer`."""
    buffer: Tensor
    """[D C, ...]: C rows for each of D data-parallel ranks."""
    first: int
    """This rank's first row."""
    weights: Tensor
    """[c, ...] in the dtype of the optimizer: this rank's rows, at most C. A view of `buffer` if that has the same dtype."""
    bands: Sequence[Band]
    is_shared: bool
    """Whether every tensor-parallel rank has all of it: norms."""

    data: dist.ProcessGroup

    def own(self, buffer: Tensor) -> Tensor:
        """[C, ...]: this rank's part of `buffer`, or of another of its shape."""
        return buffer.narrow(0, self.first, len(buffer) // self.data.size())

    def shards(self, rows: Tensor) -> list[Shard]:
        """Slices of checkpoint tensors in `rows`, one for each of `weights`."""
        shards: list[Shard] = []
        start = 0
        for band in self.bands:
            low, high = max(start, self.first), min(start + band.num_rows, self.first + len(rows))
            if low < high:
                offsets = (band.offsets[0] + low - start, *band.offsets[1:])
                shards.append(Shard(band.name, band.shape, offsets, rows[low - self.first : high - self.first]))
            start += band.num_rows
        return shards


def make_parts(
    network: nn.Module, model: ModelShape, groups: Groups, *, dtype: torch.dtype, region: AbstractContextManager[None]
) -> list[Part]:
    """Allocates the parameters of a network on the meta device, without values. dtype: of what the optimizer steps."""
    rank, size, num_parts = groups.tensor.rank(), groups.tensor.size(), groups.data.size()
    parts: list[Part] = []
    with region:
        for name, meta in list(network.named_parameters()):
            num_rows = len(meta)
            own = -(-num_rows // num_parts)
            buffer = torch.zeros((own * num_parts, *meta.shape[1:]), dtype=meta.dtype, device=groups.device)
            first = own * groups.data.rank()
            weights = buffer[first : min(first + own, num_rows)]
            if dtype != meta.dtype:
                weights = torch.zeros_like(weights, dtype=dtype)
            parameter = nn.Parameter(buffer[:num_rows], requires_grad=meta.requires_grad)
            owner, _, attribute = name.rpartition(".")
            network.get_submodule(owner).register_parameter(attribute, parameter)
            bands = bands_of(name, model, rank=rank, size=size)
            is_shared = len(bands) == 1 and parameter.shape == bands[0].shape
            parts.append(Part(parameter, buffer, first, weights, bands, is_shared and size > 1, groups.data))
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
