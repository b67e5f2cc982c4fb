"""AdamW over one rank's parts of the parameters: state, clipping and steps."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim.adamw import adamw

from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.trainer.memory import TrainerMemory
from tasuki.trainer.replicas import NodeReplicas

MOMENTS = ("exp_avg", "exp_avg_sq")


def full_moments(parameter: Tensor) -> dict[str, Tensor]:
    """The state that fused AdamW would create at a parameter's first step."""
    return {name: torch.zeros_like(parameter) for name in MOMENTS}


class ShardedAdamW:
    """AdamW of one role. Gradients and state are allocated up front, each in its tag's arena, and keep their addresses."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        gradients: Sequence[Tensor],
        config: OptimizerConfig,
        memory: TrainerMemory,
        mesh: DeviceMesh,
    ) -> None:
        """gradients: this rank's parts of the parameters' `.grad`."""
        self._memory, self._mesh, self._max_grad_norm = memory, mesh, config.max_grad_norm
        # One pass over each tensor without temporaries; on a CPU four times as fast as separate operations.
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._gradients = list(gradients)
        self._make_state()

    @torch.no_grad()
    def clip(self, replicas: NodeReplicas | None = None) -> float:
        """Sums the gradients over nodes and scales them down to max_grad_norm. Returns their L2 norm before scaling, over all ranks."""
        if replicas is not None:
            replicas.add_up(self._gradients)
        norm = self._norm() if replicas is None else replicas.greatest(self._norm())
        if self._max_grad_norm < norm < math.inf:
            torch._foreach_mul_(self._gradients, self._max_grad_norm / (norm + 1e-6))
        return norm

    def step(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._memory.wait_for_content()
        self.optimizer.step()

    @torch.no_grad()
    def clear_gradients(self) -> None:
        torch._foreach_zero_(self._gradients)

    @torch.no_grad()
    def reset(self) -> None:
        """Resets the state to that before the first step."""
        self._memory.wait_for_content()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def settle(self) -> None:
        """Waits until state in host memory, if any, is that of the last step."""

    def close(self) -> None:
        """Frees host memory, if any."""

    def _make_state(self) -> None:
        self._memory.make_adamw_state(self.optimizer, make=full_moments)

    def _adamw(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        steps: list[Tensor],
        *,
        learning_rate: float,
    ) -> None:
        """Fused step on tensors with moments outside the optimizer. Adds 1 to each of `steps`."""
        (group,) = self.optimizer.param_groups
        adamw(
            values,
            gradients,
            first,
            second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=learning_rate,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _norm(self) -> float:
        norms = torch.stack(torch._foreach_norm(self._counted(), dtype=torch.float32)).to(torch.float64)
        square: Tensor = norms.square().sum()
        dist.all_reduce(square, group=self._mesh.get_group("dp"))
        return math.sqrt(float(square))

    def _counted(self) -> list[Tensor]:
        """Gradients that no other rank has."""
        return self._gradients
