"""Routers of a mixture of experts: recomputation replays their choice, and each expert's tokens are counted."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from tasuki.algorithms.batch import Metric
from tasuki.trainer.modules.pointwise import clamped_gate

_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter", "Qwen3_5MoeTopKRouter", "Qwen3NextTopKRouter")
# Their layers choose experts themselves, from a router's logits.
_CHOOSING = ("Glm4MoeMoE", "DeepseekV2Moe", "DeepseekV3MoE", "Glm4MoeLiteMoE")
EXPERTS = "grouped_mm"
"""Name in transformers of the implementation that sorts tokens by expert and computes all experts in one grouped product."""


def routing_operators() -> list[OpOverload]:
    """Torch operators that choose experts. A layer uses them for nothing else."""
    return [torch.ops.aten.topk.default]


class Router(nn.Module):
    """Computes like transformers' router. If logits are close, two passes over a token could choose different experts, since kernels sum
    in varying order. `routing_operators` isolates the choice, so that it can be kept for the second pass."""

    def __init__(self, router: nn.Module, *, num_chosen: int | None = None) -> None:
        """num_chosen: experts of a token, if the router does not know it."""
        super().__init__()
        given: Any = router
        self.weight: nn.Parameter = given.weight
        self.num_chosen: int = given.top_k if num_chosen is None else num_chosen
        self._is_normalized: bool = getattr(given, "norm_topk_prob", True)
        self._keeps_dtype = type(router).__name__.startswith("Qwen3")
        self.replayed_TK: Tensor | None = None
        """Experts to take in the coming pass and its recomputation; -1 where the router chooses. None: it chooses everywhere."""
        self.first_token = 0
        """Place among them of the first token that the router is called with, if an MLP computes tile by tile."""
        self.num_differing: Tensor | None = None
        """Tokens, counted like those of `load_E`, for which the router itself chooses other experts than it is given; int64."""
        self.load_E: Tensor | None = None
        """Counts of chosen tokens in passes with gradient; int64. Only ratios within a layer matter: recomputation counts twice for every
        expert."""

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E]; weights [T, K] and indices [T, K] of the chosen experts."""
        logits_TE = linear(hidden_TH, self.weight)
        probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weights_TK, chosen_TK = self._choose(probs_TE, probs_TE.detach())
        if self._is_normalized:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return logits_TE, weights_TK.to(logits_TE.dtype) if self._keeps_dtype else weights_TK, chosen_TK

    def _choose(self, scores_TE: Tensor, ranking_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and indices [T, K] of the experts that rank first, which are counted.

        ranking_TE: without gradient, so that only the indices depend on what is kept.
        """
        chosen_TK = torch.topk(ranking_TE, self.num_chosen, dim=-1).indices
        if self.replayed_TK is not None:
            own_TK, given_TK = chosen_TK, self.replayed_TK.narrow(0, self.first_token, len(chosen_TK)).long()
            chosen_TK = torch.where(given_TK < 0, own_TK, given_TK)
            if self.num_differing is not None and torch.is_grad_enabled():
                differs_T = (chosen_TK.sort(dim=-1).values != own_TK.sort(dim=-1).values).any(dim=-1)
                self.num_differing += differs_T.sum()
        if self.load_E is not None and torch.is_grad_enabled():
            chosen = chosen_TK.flatten()
            self.load_E.index_add_(0, chosen, torch.ones_like(chosen))
        return scores_TE.gather(-1, chosen_TK), chosen_TK


class BiasedRouter(Router):
    """The router of a layer that ranks sigmoids plus a bias, in float32. Weights are without the bias, sum to 1 and are scaled."""

    e_score_correction_bias: Tensor

    def __init__(self, layer: nn.Module) -> None:
        given: Any = layer
        super().__init__(given.gate, num_chosen=given.top_k)
        self.register_buffer("e_score_correction_bias", given.gate.e_score_correction_bias)
        self._scale: float = given.routed_scaling_factor
        assert given.norm_topk_prob and given.n_group == 1, "the family refuses others"

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_TH = hidden_TH.flatten(0, -2)
        logits_TE = linear(hidden_TH.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid()
        weights_TK, chosen_TK = self._choose(scores_TE, scores_TE.detach() + self.e_score_correction_bias)
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return logits_TE, weights_TK * self._scale, chosen_TK


class ChosenRouter(Router):
    """The router of gpt-oss: its weights are a softmax over the chosen experts alone, here in float32."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__(router)
        self.bias: nn.Parameter = router.get_parameter("bias")

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = linear(hidden_TH, self.weight, self.bias)
        logits_TK, chosen_TK = self._choose(logits_TE, logits_TE.detach())
        return logits_TE, torch.softmax(logits_TK, dim=-1, dtype=torch.float32).to(logits_TE.dtype), chosen_TK


class ScaledRouter(Router):
    """The router of a layer that computes its logits itself, in float32, and ranks probabilities. Weights are scaled."""

    def __init__(self, layer: nn.Module) -> None:
        given: Any = layer
        super().__init__(given.gate, num_chosen=given.top_k)
        self._scale: float = given.routed_scaling_factor

    def forward(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        probs_TE = logits_TE.flatten(0, -2).softmax(dim=-1)
        weights_TK, chosen_TK = self._choose(probs_TE, probs_TE.detach())
        return logits_TE, weights_TK * self._scale, chosen_TK

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the place of the layer's own choice."""
        return _routes(self(logits_TE))


def replace_routers(causal_lm: nn.Module) -> None:
    """Replaces the routers, and the activation of gpt-oss's experts. Parameters keep their names and order."""
    for parent in list(causal_lm.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ in _ROUTERS:
                setattr(parent, name, Router(module))
            elif type(module).__name__ == "GptOssTopKRouter":
                setattr(parent, name, ChosenRouter(module))
            elif type(module).__name__ == "GptOssExperts":
                module.__dict__["_apply_gate"] = clamped_gate(module)
            elif type(module).__name__ in _CHOOSING and not isinstance(module.gate, Router):
                layer: Any = module
                is_biased = hasattr(layer.gate, "e_score_correction_bias")
                layer.gate = BiasedRouter(layer) if is_biased else ScaledRouter(layer)
                layer.route_tokens_to_experts = _routes if is_biased else layer.gate.route


def _routes(routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Takes the place of a layer's own choice. routed: of a BiasedRouter."""
    return routed[2], routed[1]


class Replay:
    """The routers of a network, by the layer that they belong to."""

    def __init__(self, causal_lm: nn.Module) -> None:
        layers: Any = causal_lm.get_submodule("model.layers")
        self._num_layers = len(layers)
        self._routers = [
            (index, module) for index, layer in enumerate(layers) for module in layer.modules() if isinstance(module, Router)
        ]

    def give(self, routes_TR: Tensor | None) -> None:
        """Sets the experts of the coming pass's tokens in all layers; see TokenBatch."""
        for index, router in self._routers:
            router.replayed_TK = None if routes_TR is None else routes_TR.unflatten(1, (self._num_layers, -1))[:, index]


class ExpertLoad:
    """Tokens of each expert in each sparse layer since the last reading, and those that were given other experts than their router's."""

    def __init__(self, causal_lm: nn.Module, *, mesh: DeviceMesh, device: torch.device) -> None:
        self._routers = routers = [module for module in causal_lm.modules() if isinstance(module, Router)]
        self._group = mesh.get_group("dp")
        self._num_ranks = mesh.size()
        self._counts_LE = torch.zeros(
            len(routers), routers[0].weight.shape[0] if routers else 0, dtype=torch.int64, device=device
        )
        self._differing_L = torch.zeros(len(routers), dtype=torch.int64, device=device)
        self._num_chosen = routers[0].num_chosen if routers else 1
        for router, load_E, num_differing in zip(routers, self._counts_LE, self._differing_L, strict=True):
            router.load_E, router.num_differing = load_E, num_differing

    def take(self) -> Mapping[str, Metric]:
        """Metrics over all ranks' tokens, equal on each rank; empty without experts or tokens. Collective."""
        if not self._counts_LE.numel():
            return {}
        counts_LE = torch.cat([self._counts_LE, self._differing_L.unsqueeze(1)], dim=1).double()
        self._counts_LE.zero_()
        self._differing_L.zero_()
        dist.all_reduce(counts_LE, group=self._group)
        counts_LE, differing_L = counts_LE[:, :-1], counts_LE[:, -1]
        one = torch.ones((), dtype=torch.float64, device=counts_LE.device)
        busiest = (counts_LE.amax(dim=1) / counts_LE.mean(dim=1).clamp(min=1e-9)).amax()
        tokens_L = counts_LE.sum(dim=1) / self._num_chosen
        idle = (counts_LE == 0).sum().double()
        metrics = {
            "expert_load_max": Metric(busiest, one, "max"),
            "idle_expert_fraction": Metric(idle, one * counts_LE.numel()),
        }
        if any(router.replayed_TK is not None for router in self._routers):
            # By layer, since recomputed ones count twice.
            share = (differing_L / tokens_L.clamp(min=1)).mean()
            metrics["router_disagreement"] = Metric(share * tokens_L.sum(), tokens_L.sum())
        return metrics
