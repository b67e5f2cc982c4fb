"""Routes of tiny models: by transformers' own routers, and in the form of rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

_ROUTERS = ("Qwen3MoeTopKRouter", "Qwen3_5MoeTopKRouter", "MixtralTopKRouter", "GptOssTopKRouter")


def own_routes(model: nn.Module, token_ids: Sequence[int]) -> NDArray[np.int64]:
    """[tokens - 1, L, K]: experts of all tokens but the last, by transformers."""
    with torch.no_grad(), choices(model) as chosen:
        model(torch.tensor([list(token_ids)[:-1]]))
    return torch.stack(chosen, dim=1).numpy()


@contextmanager
def choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """The indices [T, K] that each router of the block's passes has chosen."""
    chosen: list[Tensor] = []

    def counted(route: Any) -> Any:
        def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen.append((result := route(logits))[0])
            return result

        return routed

    layers: list[Any] = [module for module in model.modules() if hasattr(module, "route_tokens_to_experts")]
    for layer in layers:
        layer.route_tokens_to_experts = counted(layer.route_tokens_to_experts)
    hooks = [
        module.register_forward_hook(lambda _module, _args, result: chosen.append(result[2]))
        for module in model.modules()
        if not layers and type(module).__name__.lower().endswith("topkrouter")  # all that choose, from transformers 5.19 on
    ]
    yield chosen
    for hook in hooks:
        hook.remove()
    for layer in layers:
        del layer.route_tokens_to_experts


def force(model: nn.Module, routes: Sequence[NDArray[np.int64]]) -> None:
    """Makes transformers' routers take these experts, [tokens - 1, L, K] for each coming pass, with weights by their own scores.

    The last token of a pass, which predicts nothing, takes those of the first.
    """
    passes, given = iter(routes), list[Tensor]()

    def begin(_module: Any, _args: Any, _named: Any = None) -> None:
        routes_TLK = torch.from_numpy(next(passes))
        given[:] = torch.cat([routes_TLK, routes_TLK[:1]]).unbind(1)

    def take(module: Any, _args: Any, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        chosen_TK = given.pop(0)
        if type(module).__name__ == "GptOssTopKRouter":
            return result[0], result[0].gather(-1, chosen_TK).softmax(dim=-1), chosen_TK
        weights_TK = result[0].softmax(dim=-1, dtype=torch.float32).gather(-1, chosen_TK)
        if getattr(module, "norm_topk_prob", True):
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return result[0], weights_TK.to(result[1].dtype), chosen_TK

    def routing(layer: Any) -> Any:
        def route(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
            chosen_TK = given.pop(0)
            if not hasattr(layer.gate, "e_score_correction_bias"):
                weights_TK = logits_TE.view(len(chosen_TK), -1).softmax(dim=-1).gather(-1, chosen_TK)
                return chosen_TK, weights_TK * layer.routed_scaling_factor
            weights_TK = logits_TE.view(len(chosen_TK), -1).sigmoid().gather(-1, chosen_TK)
            return chosen_TK, weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20) * layer.routed_scaling_factor

        return route

    model.register_forward_pre_hook(begin)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__ in _ROUTERS:
            module.register_forward_hook(take)
        elif hasattr(module, "route_tokens_to_experts"):
            module.route_tokens_to_experts = routing(module)


def _mixtures(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if not hasattr(layer.mlp, "gate_proj")]


def gates_of(model: Any) -> list[Any]:
    """The routers of the sparse layers."""
    return [mlp.router if hasattr(mlp, "router") else mlp.gate for mlp in _mixtures(model)]


def hidden_states(model: Any) -> list[list[Tensor]]:
    """Of each sparse layer, the inputs [T, H] of the coming passes' routers; filled by these passes."""
    kept_L: list[list[Tensor]] = [[] for _ in gates_of(model)]
    for layer, kept in zip(model.model.layers[-len(kept_L) :], kept_L, strict=True):
        layer.mlp.register_forward_pre_hook(lambda _module, args, kept=kept: kept.append(args[0].flatten(0, -2)))
    return kept_L


def balancing_loss(model: Any, hidden_LTH: Sequence[Tensor], routes_TLK: Tensor | None = None) -> Tensor:
    """transformers' load-balancing loss, with DeepSeek's probabilities for routers that rank sigmoids.

    routes_TLK: takes the place of the routers' choice.
    """
    probs, chosen, num_chosen = list[Tensor](), list[Tensor](), model.config.num_experts_per_tok
    for mixture, gate, hidden_TH in zip(_mixtures(model), gates_of(model), hidden_LTH, strict=True):
        logits_TE = linear(hidden_TH, gate.weight, getattr(gate, "bias", None))
        bias_E = getattr(gate, "e_score_correction_bias", None)
        scores_TE = logits_TE.softmax(dim=-1) if bias_E is None else logits_TE.sigmoid()
        probs.append(scores_TE if bias_E is None else scores_TE / scores_TE.sum(dim=-1, keepdim=True))
        if routes_TLK is None:
            is_own = bias_E is not None  # a biased layer's
            chosen.append(mixture.route_tokens_to_experts(logits_TE)[0] if is_own else scores_TE.topk(num_chosen).indices)
    probs_TE, chosen_TK = torch.cat(probs), torch.cat(chosen if routes_TLK is None else list(routes_TLK.unbind(1)))
    if routes_TLK is None and gates_of(model)[0].__class__.__name__ in _ROUTERS:
        return torch.as_tensor(load_balancing_loss_func(tuple(each.log() for each in probs), probs_TE.shape[1], num_chosen))
    load_E = one_hot(chosen_TK, probs_TE.shape[1]).float().sum(dim=1).mean(dim=0)
    return probs_TE.shape[1] * (load_E * probs_TE.mean(dim=0)).sum()
