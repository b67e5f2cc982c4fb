"""Routers of a mixture of experts: recomputation replays their choice, each expert's tokens are counted, and their load is balanced."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from tasuki.algorithms.batch import Metric
from tasuki.trainer.data.micro_batch import TokenBatch
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
        """Experts to take in the coming pass and its recomputation; -1 where the router chooses, which a pass without gradient replaces by
        its choice. None: it chooses everywhere."""
        self.first_token = 0
        """Place among them of the first token that the router is called with, if it sees a part: a tile, or a rank's."""
        self.num_differing: Tensor | None = None
        """Tokens, counted like those of `load_E`, for which the router itself chooses other experts than it is given; int64."""
        self.load_E: Tensor | None = None
        """Counts of chosen tokens in passes with gradient; int64."""
        self.num_tokens = 0
        """Tokens of the pass that count; dummies follow them."""
        self.is_counting = False
        """Whether this is a pass with gradient, and not its recomputation."""
        self.is_balanced = False
        """Whether probabilities are summed for the auxiliary loss."""
        self.prob_sum_E: Tensor | None = None
        """Sums of the pass's probabilities, with gradient, if it is balanced; float32."""

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
            if not torch.is_grad_enabled():
                self.replayed_TK.narrow(0, self.first_token, len(chosen_TK)).copy_(chosen_TK)
            if self.num_differing is not None and self.is_counting:
                differs_T = (chosen_TK.sort(dim=-1).values != own_TK.sort(dim=-1).values).any(dim=-1)
                self.num_differing += differs_T.sum()
        num_counted = max(0, self.num_tokens - self.first_token)
        if self.load_E is not None and self.is_counting:
            chosen = chosen_TK[:num_counted].flatten()
            self.load_E.index_add_(0, chosen, torch.ones_like(chosen))
        if self.is_balanced and torch.is_grad_enabled():
            # In recomputation, too, which must keep as many tensors.
            sum_E = self._probs(scores_TE)[:num_counted].sum(dim=0)
            if self.is_counting:
                self.prob_sum_E = sum_E if self.prob_sum_E is None else self.prob_sum_E + sum_E
        return scores_TE.gather(-1, chosen_TK), chosen_TK

    def _probs(self, scores_TE: Tensor) -> Tensor:
        """[T, E] float32: probabilities of all experts, from the scores that are ranked."""
        return scores_TE


class BiasedRouter(Router):
    """The router of a layer that ranks sigmoids plus a bias, in float32. Weights are without the bias, sum to 1 and are scaled."""

    e_score_correction_bias: Tensor

    def __init__(self, layer: nn.Module) -> None:
        given: Any = layer
        super().__init__(given.gate, num_chosen=given.config.num_experts_per_tok)
        self.register_buffer("e_score_correction_bias", given.gate.e_score_correction_bias)
        self._scale: float = given.config.routed_scaling_factor
        self._num_groups: int = given.config.n_group
        self._num_chosen_groups: int = given.config.topk_group
        assert given.config.norm_topk_prob, "the family refuses others"

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_TH = hidden_TH.flatten(0, -2)
        logits_TE = linear(hidden_TH.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid()
        ranking_TE = scores_TE.detach() + self.e_score_correction_bias
        if self._num_groups > 1:
            ranking_TE = self._in_best_groups(ranking_TE)
        weights_TK, chosen_TK = self._choose(scores_TE, ranking_TE)
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return logits_TE, weights_TK * self._scale, chosen_TK

    def _probs(self, scores_TE: Tensor) -> Tensor:
        """Normalized as in DeepSeek-V3 (arXiv:2412.19437) eq. 19."""
        return scores_TE / scores_TE.sum(dim=-1, keepdim=True)

    def _in_best_groups(self, ranking_TE: Tensor) -> Tensor:
        """The ranking with -inf outside the groups that rank first, by the sum of their two best experts.

        Sorts, because results of `routing_operators` are kept for recomputation. Source: DeepSeek-V3 (arXiv:2412.19437) sec. 2.1.2.
        """
        by_group_TGE = ranking_TE.unflatten(-1, (self._num_groups, -1))
        order_TG = by_group_TGE.sort(descending=True).values[..., :2].sum(dim=-1).argsort(descending=True)
        is_left_TG = torch.ones_like(order_TG, dtype=torch.bool).scatter(-1, order_TG[:, : self._num_chosen_groups], False)
        return by_group_TGE.masked_fill(is_left_TG.unsqueeze(-1), float("-inf")).flatten(-2)


class ChosenRouter(Router):
    """The router of gpt-oss: its weights are a softmax over the chosen experts alone, here in float32."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__(router)
        self.bias: nn.Parameter = router.get_parameter("bias")

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = linear(hidden_TH, self.weight, self.bias)
        logits_TK, chosen_TK = self._choose(logits_TE, logits_TE.detach())
        return logits_TE, torch.softmax(logits_TK, dim=-1, dtype=torch.float32).to(logits_TE.dtype), chosen_TK

    def _probs(self, scores_TE: Tensor) -> Tensor:
        return torch.softmax(scores_TE, dim=-1, dtype=torch.float32)


class ScaledRouter(Router):
    """A router of float32 logits that ranks probabilities. Weights are scaled. Before transformers 5.19 the layer computes its logits."""

    def __init__(self, layer: nn.Module) -> None:
        given: Any = layer
        super().__init__(given.gate, num_chosen=given.config.num_experts_per_tok)
        self._scale: float = given.config.routed_scaling_factor
        self._has_logits = isinstance(given.gate, nn.Linear)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the layer's logits [T, E] instead if it computes them."""
        logits_TE = hidden_TH if self._has_logits else linear(hidden_TH.float(), self.weight.float())
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


class Routers:
    """The routers of a network, by the layer that they belong to."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._num_layers = len(layers)
        self._routers = [
            (index, module) for index, layer in enumerate(layers) for module in layer.modules() if isinstance(module, Router)
        ]

    def begin(self, batch: TokenBatch, *, first_token: int = 0) -> None:
        """Prepares for the coming pass: the experts of its tokens in all layers, if they are given, and what counts.

        first_token: of those that this rank's routers see.
        """
        routes_TR = batch.routes_TR
        for index, router in self._routers:
            router.replayed_TK = None if routes_TR is None else routes_TR.unflatten(1, (self._num_layers, -1))[:, index]
            router.num_tokens, router.first_token = len(batch.input_ids_T) - batch.num_dummies, first_token
            router.is_counting, router.prob_sum_E = torch.is_grad_enabled(), None


class ExpertLoad:
    """Tokens of each expert in each sparse layer, those that were given other experts than their router's, and what balances them."""

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        """aux_loss_coef, bias_update_rate: see TrainerConfig; the latter needs routers with biases."""
        self._routers = routers = [module for module in causal_lm.modules() if isinstance(module, Router)]
        self._group, self._aux_loss_coef, self._bias_update_rate = mesh.get_group("dp"), aux_loss_coef, bias_update_rate
        self._counts_LE = torch.zeros(
            len(routers), routers[0].weight.shape[0] if routers else 0, dtype=torch.int64, device=device
        )
        self._differing_L = torch.zeros(len(routers), dtype=torch.int64, device=device)
        self._num_chosen = routers[0].num_chosen if routers else 1
        self._earlier_E = torch.zeros_like(self._counts_LE.sum(dim=0))
        """Counts, over layers, of earlier passes of this call."""
        self._aux_losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of this call's auxiliary losses times their weights, and of the weights."""
        self.step_counts_LE = torch.zeros_like(self._counts_LE, dtype=torch.float64)
        """Of all ranks' tokens since the last step."""
        for router, load_E, num_differing in zip(routers, self._counts_LE, self._differing_L, strict=True):
            router.load_E, router.num_differing = load_E, num_differing
            router.is_balanced = aux_loss_coef > 0.0

    @property
    def moves_biases(self) -> bool:
        return self._bias_update_rate > 0.0

    def end_pass(self, *, share: float) -> Tensor | None:
        """Ends what a forward pass counts. Returns this rank's part of the auxiliary loss, None without one. Collective with one.

        The loss is over the tokens of all ranks' current micro-batches. share: of this rank's in the loss.
        Source: Switch Transformers (arXiv:2101.03961) eq. 4-6, over all layers at once as in transformers' load_balancing_loss_func.
        """
        sums = [router.prob_sum_E for router in self._routers if router.prob_sum_E is not None]
        for router in self._routers:
            router.is_counting, router.prob_sum_E = False, None
        if not sums:
            return None
        probs_E, num_experts = torch.stack(sums).sum(dim=0), len(self._earlier_E)
        counts_E = self._counts_LE.sum(dim=0)
        mine = (counts_E - self._earlier_E).double(), probs_E.detach().double(), self._aux_losses.new_tensor([share])
        self._earlier_E = counts_E
        dist.all_reduce(whole := torch.cat(mine), group=self._group)
        counts_E, prob_sum_E, share_1 = whole.split([num_experts, num_experts, 1])
        num_tokens = (counts_E.sum() / self._num_chosen).clamp(min=1.0)
        slope_E = num_experts * counts_E / num_tokens.square()
        self._aux_losses += torch.cat([share_1 * torch.dot(slope_E, prob_sum_E), share_1])
        return self._aux_loss_coef * torch.dot((share_1 * slope_E).float(), probs_E)

    def take(self) -> Mapping[str, Metric]:
        """Metrics over all ranks' tokens, equal on each rank; empty without experts or tokens. Collective."""
        if not self._counts_LE.numel():
            return {}
        counts_LE = torch.cat([self._counts_LE, self._differing_L.unsqueeze(1)], dim=1).double()
        aux_loss, share = self._aux_losses.tolist() if self._aux_loss_coef else (0.0, 0.0)
        self.discard_call()
        dist.all_reduce(counts_LE, group=self._group)
        counts_LE, differing_L = counts_LE[:, :-1], counts_LE[:, -1]
        self.step_counts_LE += counts_LE
        one = torch.ones((), dtype=torch.float64, device=counts_LE.device)
        busiest = (counts_LE.amax(dim=1) / counts_LE.mean(dim=1).clamp(min=1e-9)).amax()
        idle = (counts_LE == 0).sum().double()
        metrics = {
            "expert_load_max": Metric(busiest, one, "max"),
            "idle_expert_fraction": Metric(idle, one * counts_LE.numel()),
        }
        if share:
            metrics["router_aux_loss"] = Metric(one * aux_loss, one * share)
        if any(router.replayed_TK is not None for router in self._routers):
            metrics["router_disagreement"] = Metric(differing_L.sum(), counts_LE.sum() / self._num_chosen)
        return metrics

    def discard_call(self) -> None:
        """Forgets what this call has counted."""
        for counted in (self._counts_LE, self._differing_L, self._earlier_E, self._aux_losses):
            counted.zero_()

    def update_biases(self) -> None:
        """Raises the biases of experts with fewer tokens than the mean since the last step, and lowers those of others.

        Source: DeepSeek-V3 (arXiv:2412.19437) sec. 2.1.2.
        """
        if self.moves_biases:
            lacking_LE = self.step_counts_LE.mean(dim=1, keepdim=True) - self.step_counts_LE
            for router, lacking_E in zip(self._routers, lacking_LE, strict=True):
                assert isinstance(router, BiasedRouter), "check_model refuses others"
                router.e_score_correction_bias += self._bias_update_rate * lacking_E.sign().float()
