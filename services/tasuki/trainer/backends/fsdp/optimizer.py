"""AdamW over this rank's shards with quantized moments."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.planner.trainer_bytes import moment_block
from tasuki.trainer.adamw import MOMENTS, ShardedAdamW, full_moments, local_part

CHUNK_ELEMENTS = 1 << 23
"""Elements of a parameter processed at a time: full moments exist for this many, or for one row."""


@dataclass(frozen=True, slots=True)
class QuantizedMoment:
    """A moment of one rank's shard [..., C] in blocks of a row, so that blocks do not depend on the number of ranks."""

    codes: Tensor
    """[..., C] uint8: indices into the map of values from -1, or 0, to 1."""
    scales: Tensor
    """[..., C / block] float32: scale of each block, its largest magnitude."""
    is_signed: bool

    def read(self, rows: slice, *, dtype: torch.dtype) -> Tensor:
        """Reads [R, C] of the shard as a matrix."""
        values, _ = _value_map(self.is_signed, str(self.codes.device))
        blocks = values[_matrix(self.codes)[rows].int()].unflatten(-1, (self._num_blocks, -1))
        return (blocks * _matrix(self.scales)[rows].unsqueeze(-1)).flatten(-2).to(dtype)

    def write(self, rows: slice, moment: Tensor) -> None:
        """Writes moment, [R, C]."""
        _, bounds = _value_map(self.is_signed, str(self.codes.device))
        blocks = moment.float().unflatten(-1, (self._num_blocks, -1))
        scales = blocks.abs().amax(-1)
        scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        _matrix(self.codes)[rows] = torch.bucketize(scaled, bounds, out_int32=True, right=True).flatten(-2).to(torch.uint8)
        _matrix(self.scales)[rows] = scales

    @property
    def _num_blocks(self) -> int:
        return self.scales.shape[-1]


class QuantizedAdamW(ShardedAdamW):
    """ShardedAdamW with quantized moments, which change results. Tensors without a `moment_block` keep full moments."""

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> None:
        self._memory.wait_for_content()
        for parameter, state in self.optimizer.state.items():
            count = state["step"]
            for part, gradient, moments in _parts(cast(Parameter, parameter), state):
                # The function counts a step for each call.
                step = count.clone()
                full = [
                    moment if isinstance(moment, Tensor) else moment[0].read(moment[1], dtype=part.dtype) for moment in moments
                ]
                self._adamw([part], [gradient], full[:1], full[1:], [step], learning_rate=learning_rate)
                for moment, result in zip(moments, full, strict=True):
                    if not isinstance(moment, Tensor):
                        moment[0].write(moment[1], result)
            count += 1

    def _make_state(self) -> None:
        self._memory.make_adamw_state(self.optimizer, make=_make_moments)


def _make_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Both moments, initialized to 0, under their names in a checkpoint."""
    block = moment_block(tuple(parameter.shape))
    if block is None:
        return full_moments(parameter)
    return {
        key: _zeros(cast(DTensor, parameter), shape, dtype)
        for name in MOMENTS
        for key, shape, dtype in (
            (f"{name}_codes", parameter.shape, torch.uint8),
            (f"{name}_scales", (*parameter.shape[:-1], parameter.shape[-1] // block), torch.float32),
        )
    }


def _zeros(like: DTensor, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    """Zeros, sharded as `like`; only the last size of the shape may differ."""
    local = like.to_local()
    zeros = torch.zeros((*local.shape[:-1], shape[-1]), dtype=dtype, device=local.device)
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        zeros, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


_Moment = Tensor | tuple[QuantizedMoment, slice]


def _parts(parameter: Parameter, state: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, list[_Moment]]]:
    """Parts of this rank's shard: values, gradients, and both moments or accessors to them."""
    values, gradient = local_part(parameter), local_part(cast(Tensor, parameter.grad))
    if not values.numel():
        return
    if "exp_avg" in state:
        yield values, gradient, [local_part(state[name]) for name in MOMENTS]
        return
    quantized = [
        QuantizedMoment(local_part(state[f"{name}_codes"]), local_part(state[f"{name}_scales"]), is_signed=name == "exp_avg")
        for name in MOMENTS
    ]
    values, gradient = _matrix(values), _matrix(gradient)
    num_rows = max(1, CHUNK_ELEMENTS // values.shape[1])
    for first in range(0, len(values), num_rows):
        rows = slice(first, min(first + num_rows, len(values)))
        yield values[rows], gradient[rows], [(moment, rows) for moment in quantized]


@cache
def _value_map(is_signed: bool, device: str) -> tuple[Tensor, Tensor]:
    """The 256 values of the codes, and the 255 midpoints between them."""
    from torchao.optim.quant_utils import create_dynamic_map

    values = torch.tensor(create_dynamic_map(signed=is_signed), dtype=torch.float32, device=device)
    return values, (values[1:] + values[:-1]) / 2


def _matrix(shard: Tensor) -> Tensor:
    return shard.view(math.prod(shard.shape[:-1]), shard.shape[-1])
