"""Routes of tiny models: by transformers' own routers, and in the form of rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_ROUTERS = ("Qwen3MoeTopKRouter", "MixtralTopKRouter")


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
        if type(module).__name__ in _ROUTERS
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
        weights_TK = result[0].softmax(dim=-1, dtype=torch.float32).gather(-1, chosen_TK)
        if getattr(module, "norm_topk_prob", True):
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return result[0], weights_TK.to(result[1].dtype), chosen_TK

    def biased(layer: Any) -> Any:
        def route(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
            chosen_TK = given.pop(0)
            weights_TK = logits_TE.view(len(chosen_TK), -1).sigmoid().gather(-1, chosen_TK)
            return chosen_TK, weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20) * layer.routed_scaling_factor

        return route

    model.register_forward_pre_hook(begin)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__ in _ROUTERS:
            module.register_forward_hook(take)
        elif hasattr(module, "route_tokens_to_experts"):
            module.route_tokens_to_experts = biased(module)
