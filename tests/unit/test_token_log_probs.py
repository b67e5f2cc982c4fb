"""Token log-probabilities and entropies against log_softmax, and their gradients against autograd's."""

from __future__ import annotations

import pytest
import torch

from tasuki.algorithms import token_log_probs as module
from tasuki.algorithms.token_log_probs import token_log_probs

N, V = 7, 11
TEMPERATURE_N = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.5, 2.0, 1.0])


def _logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(N, V, generator=generator)
    return logits_NV.to(dtype).requires_grad_(), torch.randint(V, (N,), generator=generator)


def _expected(logits_NV: torch.Tensor, token_ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    all_log_probs_NV = torch.log_softmax(logits_NV.double() / TEMPERATURE_N.double().unsqueeze(-1), dim=-1)
    return all_log_probs_NV[torch.arange(N), token_ids_N], -(all_log_probs_NV.exp() * all_log_probs_NV).sum(-1)


@pytest.mark.parametrize("block_values", [1 << 24, 2 * V, 1])
@pytest.mark.parametrize(("log_prob_coef", "entropy_coef"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_values_and_gradients_are_log_softmax(
    monkeypatch: pytest.MonkeyPatch, block_values: int, log_prob_coef: float, entropy_coef: float
) -> None:
    monkeypatch.setattr(module, "_BLOCK_VALUES", block_values)
    logits_NV, token_ids_N = _logits()
    weights_N = torch.arange(1.0, N + 1)

    def objective(log_probs_N: torch.Tensor, entropy_N: torch.Tensor) -> torch.Tensor:
        terms = [(log_prob_coef, log_probs_N), (entropy_coef, entropy_N.square())]
        return sum((coef * (values * weights_N).sum() for coef, values in terms if coef), start=torch.zeros(()))

    results, expected = token_log_probs(logits_NV, token_ids_N, temperature_N=TEMPERATURE_N), _expected(logits_NV, token_ids_N)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference.float())
    (grad_NV,) = torch.autograd.grad(objective(*results), logits_NV)
    (expected_NV,) = torch.autograd.grad(objective(*expected), logits_NV)
    torch.testing.assert_close(grad_NV, expected_NV)


def test_an_unused_output_costs_nothing_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backward = module._TokenLogProbs.backward
    monkeypatch.setattr(
        module._TokenLogProbs, "backward", staticmethod(lambda ctx, *grads: seen.append(grads) or backward(ctx, *grads))
    )
    logits_NV, token_ids_N = _logits()
    for used in (0, 1):
        token_log_probs(logits_NV, token_ids_N, temperature_N=TEMPERATURE_N)[used].sum().backward()
        assert seen[used][used] is not None
        assert seen[used][1 - used] is None


def test_bfloat16_logits_give_float32_log_probs_and_a_bfloat16_gradient() -> None:
    logits_NV, token_ids_N = _logits(torch.bfloat16)
    results = token_log_probs(logits_NV, token_ids_N, temperature_N=TEMPERATURE_N)
    sum(results).sum().backward()
    for result, reference in zip(results, _expected(logits_NV.detach(), token_ids_N), strict=True):
        torch.testing.assert_close(result, reference.float())
    assert logits_NV.grad.dtype == torch.bfloat16


def test_no_tokens_give_an_exactly_zero_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    head = torch.randn(V, 4, requires_grad=True)
    log_probs_N, entropy_N = token_log_probs(hidden @ head.T, torch.empty(0, dtype=torch.int64), temperature_N=torch.empty(0))
    (log_probs_N.sum() + entropy_N.sum()).backward()
    assert entropy_N.shape == (0,)
    assert torch.equal(head.grad, torch.zeros(V, 4))
