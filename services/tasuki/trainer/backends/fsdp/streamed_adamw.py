"""AdamW whose moments stay in host memory, and pass through the device a block at a time in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.trainer.backends.fsdp.host_buffers import Copy, copy_stream, release_buffers, start_copy, take_buffers
from tasuki.trainer.backends.fsdp.memory import TrainerMemory
from tasuki.trainer.backends.fsdp.mesh import mesh_device
from tasuki.trainer.backends.fsdp.optimizer import ShardedAdamW

BLOCK_BYTES = 256 << 20
"""Both moments of some parameters: at least one parameter, and else at most so much."""
NUM_BLOCKS = 3
"""On the device at a time: one that arrives, one that is computed with, one that leaves."""
_ALIGNMENT = 256
_SETTING = "trainer.optimizer_on_host = true"
_ADVICE = "leave it out, or give the trainer more ranks"


@dataclass(frozen=True, slots=True)
class _Block:
    parameters: Sequence[Parameter]
    places: Sequence[tuple[int, int]]
    """Where both moments of each parameter begin, in bytes of the block."""
    num_bytes: int

    def moments(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a copy of the block. memory: [num_bytes] uint8."""
        first, second = ([_view(memory, place, like) for place, like in self._at(moment)] for moment in (0, 1))
        return first, second

    def _at(self, moment: int) -> Iterator[tuple[int, Tensor]]:
        return ((place[moment], _local(parameter)) for place, parameter in zip(self.places, self.parameters, strict=True))


class StreamedAdamW(ShardedAdamW):
    """As ShardedAdamW, to the bit. All host memory is taken at the start."""

    def __init__(
        self, parameters: Sequence[Parameter], *, config: OptimizerConfig, memory: TrainerMemory, mesh: DeviceMesh
    ) -> None:
        """Every rank must call it. Raises as take_buffers."""
        self._device, self._blocks = mesh_device(mesh), list(_blocks(parameters))
        self._host = take_buffers(mesh, [block.num_bytes for block in self._blocks], setting=_SETTING, advice=_ADVICE)
        self._to_host, self._to_device = copy_stream(self._device), copy_stream(self._device)
        super().__init__(parameters, config=config, memory=memory, mesh=mesh)

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
            left.append(start_copy(self._host[index], arrived.tensor, stream=self._to_host))
        # The device's blocks are free for what comes after the last copy.
        Copy(memories[0], left[-1]).wait()

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
        self._host = []

    def _make_state(self) -> None:
        """The moments as tensors of all ranks, whose local parts are views of host memory."""
        for block, memory in zip(self._blocks, self._host, strict=True):
            memory.zero_()
            for parameter, first, second in zip(block.parameters, *block.moments(memory), strict=True):
                spec = cast(DTensor, parameter)._spec
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self._device),
                    "exp_avg": DTensor(first, spec, requires_grad=False),
                    "exp_avg_sq": DTensor(second, spec, requires_grad=False),
                }

    def _fetch(self, index: int, memory: Tensor) -> Copy:
        target = memory[: self._blocks[index].num_bytes]
        return Copy(target, start_copy(target, self._host[index], stream=self._to_device))

    def _step_block(self, block: _Block, memory: Tensor, *, learning_rate: float) -> None:
        self._adamw(
            [_local(parameter) for parameter in block.parameters],
            [_local(cast(Parameter, parameter.grad)) for parameter in block.parameters],
            *block.moments(memory),
            [self.optimizer.state[parameter]["step"] for parameter in block.parameters],
            learning_rate=learning_rate,
        )


def _blocks(parameters: Sequence[Parameter]) -> Iterator[_Block]:
    chosen: list[Parameter] = []
    places: list[tuple[int, int]] = []
    end = 0
    for parameter in parameters:
        size = -(-_local(parameter).nbytes // _ALIGNMENT) * _ALIGNMENT
        if chosen and end + 2 * size > BLOCK_BYTES:
            yield _Block(chosen, places, max(end, _ALIGNMENT))
            chosen, places, end = [], [], 0
        chosen.append(parameter)
        places.append((end, end + size))
        end += 2 * size
    yield _Block(chosen, places, max(end, _ALIGNMENT))


def _view(memory: Tensor, place: int, like: Tensor) -> Tensor:
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return cast(DTensor, parameter.detach()).to_local()
