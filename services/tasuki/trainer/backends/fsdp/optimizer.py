"""AdamW over this rank's shards with quantized moments, and with moments in host memory, streamed through the device in each step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.planner.trainer_bytes import moment_block
from tasuki.trainer.adamw import MOMENTS, ShardedAdamW, full_moments
from tasuki.trainer.backends.fsdp.memory import Copy, copy_stream, release_buffers, start_copy, take_buffers
from tasuki.trainer.memory import TrainerMemory
from tasuki.trainer.replicas import mesh_device

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


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return cast(DTensor, tensor.detach()).to_local()


BLOCK_BYTES = 256 << 20
"""Both moments of some parameters, or of a part of one."""
NUM_BLOCKS = 3
"""Blocks on the device at a time: one arriving, one in use, one leaving."""
_ALIGNMENT = 256
_SETTING = 'trainer.moments = "host"'
_ADVICE = "remove it, or give the trainer more ranks"


@dataclass(frozen=True, slots=True)
class _Home:
    """One buffer of host memory with both moments of some parameters."""

    parameters: Sequence[Parameter]
    places: Sequence[tuple[int, int]]
    """Offset of each parameter's moments, in bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, end) of a parameter's local part."""

    parameter: Parameter
    start: int
    end: int
    places: tuple[int, int]
    """Offsets of both moments in the block, in bytes."""

    def of(self, tensor: Tensor) -> Tensor:
        return local_part(tensor).view(-1)[self.start : self.end]

    def moment(self, memory: Tensor, place: int) -> Tensor:
        """memory: [num_bytes of the block] uint8."""
        like = self.of(self.parameter)
        return memory[place : place + like.nbytes].view(like.dtype)


@dataclass(frozen=True, slots=True)
class _Block:
    pieces: Sequence[_Piece]
    spans: Sequence[tuple[Tensor, int]]
    """Host memory, and its offset in the block."""

    @property
    def num_bytes(self) -> int:
        return max(place + span.nbytes for span, place in self.spans)


class StreamedAdamW(ShardedAdamW):
    """ShardedAdamW with bit-identical results. All host memory is allocated at start."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        gradients: Sequence[Tensor],
        config: OptimizerConfig,
        memory: TrainerMemory,
        mesh: DeviceMesh,
    ) -> None:
        """Collective. Raises as take_buffers."""
        self._device, self._homes = mesh_device(mesh), list(_homes(parameters))
        self._host = take_buffers(mesh, [home.num_bytes for home in self._homes], setting=_SETTING, advice=_ADVICE)
        self._blocks = [block for home, host in zip(self._homes, self._host, strict=True) for block in _blocks(home, host)]
        self._to_host, self._to_device = copy_stream(self._device), copy_stream(self._device)
        super().__init__(parameters, gradients=gradients, config=config, memory=memory, mesh=mesh)

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> None:
        largest = max(block.num_bytes for block in self._blocks)
        memories = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(NUM_BLOCKS)]
        left: list[torch.cuda.Event | None] = []
        arriving = self._fetch(0, memories[0])
        for index, block in enumerate(self._blocks):
            arrived = arriving
            if index + 1 < len(self._blocks):
                if index + 1 >= NUM_BLOCKS and self._to_device is not None:
                    self._to_device.wait_event(cast(torch.cuda.Event, left[index + 1 - NUM_BLOCKS]))
                arriving = self._fetch(index + 1, memories[(index + 1) % NUM_BLOCKS])
            arrived.wait()
            self._step_block(block, arrived.tensor, learning_rate=learning_rate)
            left.append(self._bring_back(block, arrived.tensor))
        # The step includes its last copy: otherwise the next changeover would wait for it.
        self.settle()

    @torch.no_grad()
    def reset(self) -> None:
        self.settle()
        for buffer in self._host:
            buffer.zero_()
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def settle(self) -> None:
        if self._to_host is not None:
            self._to_host.synchronize()

    def close(self) -> None:
        self.optimizer.state.clear()
        release_buffers(self._host, device=self._device)
        self._host, self._blocks = [], []

    def _make_state(self) -> None:
        """The moments as DTensors whose local parts are views of host memory."""
        for home, memory in zip(self._homes, self._host, strict=True):
            memory.zero_()
            for parameter, places in zip(home.parameters, home.places, strict=True):
                first, second = (_view(memory, place, local_part(parameter)) for place in places)
                spec = cast(DTensor, parameter)._spec
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self._device),
                    "exp_avg": DTensor(first, spec, requires_grad=False),
                    "exp_avg_sq": DTensor(second, spec, requires_grad=False),
                }

    def _fetch(self, index: int, memory: Tensor) -> Copy:
        is_done: torch.cuda.Event | None = None
        for span, place in self._blocks[index].spans:
            is_done = start_copy(memory[place : place + span.nbytes], span, stream=self._to_device)
        return Copy(memory, is_done)

    def _bring_back(self, block: _Block, memory: Tensor) -> torch.cuda.Event | None:
        is_done: torch.cuda.Event | None = None
        for span, place in block.spans:
            is_done = start_copy(span, memory[place : place + span.nbytes], stream=self._to_host)
        return is_done

    def _step_block(self, block: _Block, memory: Tensor, *, learning_rate: float) -> None:
        self._adamw(
            [piece.of(piece.parameter) for piece in block.pieces],
            [piece.of(cast(Parameter, piece.parameter.grad)) for piece in block.pieces],
            [piece.moment(memory, piece.places[0]) for piece in block.pieces],
            [piece.moment(memory, piece.places[1]) for piece in block.pieces],
            [self._count(piece) for piece in block.pieces],
            learning_rate=learning_rate,
        )

    def _count(self, piece: _Piece) -> Tensor:
        """Number of earlier steps; AdamW adds 1. A parameter's first piece, processed first, counts for all."""
        count: Tensor = self.optimizer.state[piece.parameter]["step"]
        return count if piece.start == 0 else count - 1


def _homes(parameters: Sequence[Parameter]) -> Iterator[_Home]:
    """Groups of at least one parameter, otherwise at most BLOCK_BYTES each."""
    chosen: list[Parameter] = []
    places: list[tuple[int, int]] = []
    end = 0
    for parameter in parameters:
        size = -(-local_part(parameter).nbytes // _ALIGNMENT) * _ALIGNMENT
        if chosen and end + 2 * size > BLOCK_BYTES:
            yield _Home(chosen, places, max(end, _ALIGNMENT))
            chosen, places, end = [], [], 0
        chosen.append(parameter)
        places.append((end, end + size))
        end += 2 * size
    yield _Home(chosen, places, max(end, _ALIGNMENT))


def _blocks(home: _Home, host: Tensor) -> Iterator[_Block]:
    """Yields a whole home, or the single parameter of a larger one piece by piece. host: [num_bytes of the home] uint8."""
    if home.num_bytes <= BLOCK_BYTES:
        pieces = [
            _Piece(one, 0, local_part(one).numel(), places) for one, places in zip(home.parameters, home.places, strict=True)
        ]
        yield _Block(pieces, [(host, 0)])
        return
    (parameter,), (places,) = home.parameters, home.places
    local, half = local_part(parameter), BLOCK_BYTES // 2
    for start in range(0, local.nbytes, half):
        num_bytes = min(half, local.nbytes - start)
        piece = _Piece(parameter, start // local.itemsize, (start + num_bytes) // local.itemsize, (0, half))
        spans = [(host[place + start : place + start + num_bytes], at) for place, at in zip(places, piece.places, strict=True)]
        yield _Block([piece], spans)


def _view(memory: Tensor, place: int, like: Tensor) -> Tensor:
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)
