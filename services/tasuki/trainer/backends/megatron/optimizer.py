"""AdamW over the rows that each data-parallel rank steps, with gradients in float32 or the parameters' dtype."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.trainer.adamw import ShardedAdamW, StreamedAdamW
from tasuki.trainer.backends.megatron.groups import Groups
from tasuki.trainer.backends.megatron.weights import Part, gather_weights
from tasuki.trainer.memory import TrainerMemory
from tasuki.trainer.replicas import NodeReplicas
from tasuki.wire.stages import MemoryTag


class PartsAdamW(ShardedAdamW):
    """Gradients of a step are summed over ranks once, when they are clipped. Then each rank steps its rows, and all gather them."""

    def __init__(
        self, parts: Sequence[Part], *, groups: Groups, config: OptimizerConfig, memory: TrainerMemory, mesh: DeviceMesh
    ) -> None:
        self._parts, self._groups = parts, groups
        with memory.region(MemoryTag.GRADIENTS):
            self._buffers = [torch.zeros_like(part.buffer, dtype=part.weights.dtype) for part in parts]
        memory.clear_at_resume(self._buffers)
        stepped, gradients = list[Parameter](), list[Tensor]()
        for part, buffer in zip(parts, self._buffers, strict=True):
            _accumulate(part.parameter, part.whole(buffer))
            stepped.append(Parameter(part.weights))
            gradients.append(part.own(buffer)[: len(part.weights)])
            stepped[-1].grad = gradients[-1]
        self.stepped: dict[Part, Parameter] = dict(zip(parts, stepped, strict=True))
        super().__init__(stepped, gradients=gradients, config=config, memory=memory, mesh=mesh)

    @torch.no_grad()
    def clip(self, replicas: NodeReplicas | None = None) -> float:
        if shared := [buffer for part, buffer in zip(self._parts, self._buffers, strict=True) if part.is_shared]:
            # Each tensor-parallel rank has seen its tokens, or its heads.
            flat = torch.cat([buffer.flatten() for buffer in shared])
            dist.all_reduce(flat, group=self._groups.tensor)
            sums = flat.split([buffer.numel() for buffer in shared])
            torch._foreach_copy_(shared, [total.view_as(buffer) for total, buffer in zip(sums, shared, strict=True)])
        for part, buffer in zip(self._parts, self._buffers, strict=True):
            if part.data.size() > 1:
                own = part.own(buffer)
                total = torch.empty_like(own)
                dist.reduce_scatter_tensor(total, buffer, group=part.data)
                own.copy_(total)
        return super().clip(replicas)

    def step(self, *, learning_rate: float) -> None:
        super().step(learning_rate=learning_rate)
        gather_weights(self._parts)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        torch._foreach_zero_(self._buffers)

    def _counted(self) -> list[Tensor]:
        if self._groups.tensor.rank() == 0:
            return self._gradients
        return [gradient for part, gradient in zip(self._parts, self._gradients, strict=True) if not part.is_shared]


class StreamedPartsAdamW(PartsAdamW, StreamedAdamW):
    """PartsAdamW with moments in host memory, and the same results."""


def _accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """Lets backward add to `gradient`, in its dtype."""
    if gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:
        parameter.register_post_accumulate_grad_hook(partial(_move, gradient))


def _move(gradient: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient += parameter.grad
    parameter.grad = None
