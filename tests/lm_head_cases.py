"""Random inputs of lm_head.token_log_probs, and a reference in plain torch and float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasuki.algorithms.lm_head import token_log_probs

Results = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    hidden_NH: Tensor
    weight_VH: Tensor
    token_ids_N: Tensor
    temperature_N: Tensor
    softcap: float | None

    def to(self, target: str | torch.dtype) -> Case:
        """Moves the case to a device, or converts hidden states and weight to a dtype."""
        leaves = {name: getattr(self, name).detach().to(target).requires_grad_() for name in ("hidden_NH", "weight_VH")}
        others = {name: getattr(self, name) for name in ("token_ids_N", "temperature_N")}
        if isinstance(target, str):
            others = {name: tensor.to(target) for name, tensor in others.items()}
        return replace(self, **leaves, **others)

    def results(self) -> Results:
        return token_log_probs(
            self.hidden_NH, self.weight_VH, self.token_ids_N, temperature_N=self.temperature_N, softcap=self.softcap
        )

    def plain_results(self) -> Results:
        """Reference results by torch's log_softmax over all logits, for a case in float64."""
        logits_NV = self.hidden_NH @ self.weight_VH.T
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        all_log_probs_NV = torch.log_softmax(logits_NV / self.temperature_N.double().unsqueeze(-1), dim=-1)
        log_probs_N = all_log_probs_NV.gather(-1, self.token_ids_N.unsqueeze(-1)).squeeze(-1)
        return log_probs_N, torch.special.entr(all_log_probs_NV.exp()).sum(-1)

    def gradients(self, results: Results, coefs: tuple[float, float]) -> tuple[Tensor, ...]:
        """Gradients of hidden states and weight, from a sum of both results weighted by position and `coefs`; 0 drops a result."""
        weights_N = torch.linspace(-1.0, 1.5, len(self.token_ids_N), device=results[0].device)
        terms = [coef * (values_N * weights_N).sum() for values_N, coef in zip(results, coefs, strict=True) if coef]
        return torch.autograd.grad(sum(terms[1:], start=terms[0]), (self.hidden_NH, self.weight_VH))


def make_case(
    num_places: int,
    vocab_size: int,
    *,
    hidden_size: int = 32,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    device: str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(num_places + vocab_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Case(
        normal(num_places, hidden_size).to(device, dtype).requires_grad_(),
        (normal(vocab_size, hidden_size) * 2 * hidden_size**-0.5).to(device, dtype).requires_grad_(),
        torch.randint(vocab_size, (num_places,), generator=generator).to(device),
        (0.5 + torch.rand(num_places, generator=generator)).to(device),
        softcap,
    )


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm().clamp_min(1e-30))
