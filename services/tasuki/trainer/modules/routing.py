"""Routers of a mixture of experts: recomputation replays their choice, and each expert's tokens are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from tasuki.algorithms.batch import Metric

_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter")
EXPERTS = "grouped_mm"
"""Name in transformers of the implementation that sorts tokens by expert and computes all experts in one grouped product."""


def routing_operators() -> list[OpOverload]:
    """Torch operators that choose experts. A layer uses them for nothing else."""
    return [torch.ops.aten.topk.default]


class Router(nn.Module):
    """Computes like transformers' router. If logits are close, two passes over a token could choose different experts, since kernels sum
    in varying order. `routing_operators` isolates the choice, so that it can be kept for the second pass."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        given: Any = router
        self.weight: nn.Parameter = given.weight
        self._num_chosen: int = given.top_k
        self._is_normalized: bool = getattr(given, "norm_topk_prob", True)
        self._keeps_dtype = type(router).__name__.startswith("Qwen3")
        self.load_E: Tensor | None = None
        """Counts of chosen tokens in passes with gradient; int64. Only ratios within a layer matter: recomputation counts twice for every
        expert."""

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E]; weights [T, K] and indices [T, K] of the chosen experts."""
        logits_TE = linear(hidden_TH, self.weight)
        probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        # Without gradient, so that only the indices depend on what is kept.
        chosen_TK = torch.topk(probs_TE.detach(), self._num_chosen, dim=-1).indices
        weights_TK = probs_TE.gather(-1, chosen_TK)
        if self._is_normalized:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if self.load_E is not None and torch.is_grad_enabled():
            chosen = chosen_TK.flatten()
            self.load_E.index_add_(0, chosen, torch.ones_like(chosen))
        return logits_TE, weights_TK.to(logits_TE.dtype) if self._keeps_dtype else weights_TK, chosen_TK


def replace_routers(causal_lm: nn.Module) -> None:
    """Replaces the routers. Parameters keep their names and order."""
    for parent in list(causal_lm.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ in _ROUTERS:
                setattr(parent, name, Router(module))


class ExpertLoad:
    """Tokens of each expert in each sparse layer since the last reading."""

    def __init__(self, causal_lm: nn.Module, *, mesh: DeviceMesh, device: torch.device) -> None:
        routers = [module for module in causal_lm.modules() if isinstance(module, Router)]
        self._group = mesh.get_group("dp")
        self._num_ranks = mesh.size()
        self._counts_LE = torch.zeros(
            len(routers), routers[0].weight.shape[0] if routers else 0, dtype=torch.int64, device=device
        )
        for router, load_E in zip(routers, self._counts_LE, strict=True):
            router.load_E = load_E

    def take(self) -> Mapping[str, Metric]:
        """Metrics over all ranks' tokens, equal on each rank; empty without experts or tokens. Collective."""
        if not self._counts_LE.numel():
            return {}
        counts_LE = self._counts_LE.double()
        self._counts_LE.zero_()
        dist.all_reduce(counts_LE, group=self._group)
        one = torch.ones((), dtype=torch.float64, device=counts_LE.device)
        busiest = (counts_LE.amax(dim=1) / counts_LE.mean(dim=1).clamp(min=1e-9)).amax()
        idle = (counts_LE == 0).sum().double()
        return {
            "expert_load_max": Metric(busiest, one, "max"),
            "idle_expert_fraction": Metric(idle, one * counts_LE.numel()),
        }
