"""Losses and token log-probabilities against their definitions, and their gradients against autograd's."""

from __future__ import annotations

import pytest
import torch

from tasuki.algorithms import log_probs
from tasuki.algorithms.log_probs import token_log_probs
from tasuki.algorithms.losses import k3_kl, policy_loss_sums, ppo_clip

T, V = 7, 11


def _logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = 3 * torch.randn(T, V, generator=generator)
    return logits_TV.to(dtype).requires_grad_(), torch.randint(V, (T,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block_values", [1 << 24, 2 * V])
def test_token_log_probs_and_their_gradient_are_log_softmax(
    monkeypatch: pytest.MonkeyPatch, temperature: float, block_values: int
) -> None:
    monkeypatch.setattr(log_probs, "_BLOCK_VALUES", block_values)
    logits_TV, token_ids_T = _logits()
    weights_T = torch.arange(1.0, T + 1)
    expected_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    (expected_grad,) = torch.autograd.grad(
        (expected_TV[torch.arange(T), token_ids_T] * weights_T).sum(), logits_TV, retain_graph=True
    )
    log_probs_T, entropy_T = token_log_probs(logits_TV, token_ids_T, temperature=temperature)
    (grad,) = torch.autograd.grad((log_probs_T * weights_T).sum(), logits_TV)
    torch.testing.assert_close(log_probs_T, expected_TV[torch.arange(T), token_ids_T])
    torch.testing.assert_close(entropy_T, -(expected_TV.exp() * expected_TV).sum(-1))
    torch.testing.assert_close(grad, expected_grad)


def test_bfloat16_logits_give_float32_log_probs_and_a_bfloat16_gradient() -> None:
    logits_TV, token_ids_T = _logits(torch.bfloat16)
    log_probs_T, _ = token_log_probs(logits_TV, token_ids_T)
    log_probs_T.sum().backward()
    expected_T = torch.log_softmax(logits_TV.detach().float(), dim=-1)[torch.arange(T), token_ids_T]
    torch.testing.assert_close(log_probs_T, expected_T)
    assert logits_TV.grad is not None
    assert logits_TV.grad.dtype == torch.bfloat16


def test_no_tokens_give_an_exactly_zero_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    head = torch.randn(V, 4, requires_grad=True)
    log_probs_T, entropy_T = token_log_probs(hidden @ head.T, torch.empty(0, dtype=torch.int64))
    log_probs_T.sum().backward()
    assert entropy_T.shape == (0,)
    assert torch.equal(head.grad, torch.zeros(V, 4))


def test_ppo_clip_is_the_pessimistic_bound_with_separate_sides() -> None:
    ratios = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5])
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])
    loss, is_clipped = ppo_clip(
        ratios.log(), rollout_log_probs_T=torch.zeros(5), advantages_T=advantages, clip_low=0.2, clip_high=0.28
    )
    torch.testing.assert_close(loss, torch.tensor([-0.5, 0.8, -2.0, -1.28, 1.5]))
    assert is_clipped.tolist() == [False, True, False, True, False]


def test_clipped_tokens_carry_no_gradient() -> None:
    log_probs_T = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    loss, _ = ppo_clip(
        log_probs_T,
        rollout_log_probs_T=torch.zeros(3),
        advantages_T=torch.tensor([1.0, 1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.sum().backward()
    assert log_probs_T.grad is not None
    assert log_probs_T.grad.tolist() == [-1.0, 0.0, 0.0]


def test_a_huge_ratio_stays_finite_with_its_gradient() -> None:
    log_probs_T = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, _ = ppo_clip(
        log_probs_T, rollout_log_probs_T=torch.zeros(2), advantages_T=-torch.ones(2), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert log_probs_T.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(log_probs_T.grad).all()


def test_k3_is_never_negative_and_zero_for_equal_policies() -> None:
    log_probs_T = torch.tensor([-1.0, -2.0, -0.5])
    assert k3_kl(log_probs_T, ref_log_probs_T=log_probs_T).tolist() == [0.0, 0.0, 0.0]
    assert (k3_kl(log_probs_T, ref_log_probs_T=log_probs_T + torch.tensor([0.3, -0.3, 2.0])) > 0).all()


def test_k3_is_unbiased_for_the_kl_divergence() -> None:
    policy, reference = (
        torch.log_softmax(torch.randn(V, generator=torch.Generator().manual_seed(seed)), -1) for seed in (1, 2)
    )
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3_kl(policy, ref_log_probs_T=reference)).sum(), exact)


def test_sums_count_only_unmasked_tokens() -> None:
    log_probs_T = torch.tensor([-1.0, -2.0, -3.0])
    arguments = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.5}
    masked = policy_loss_sums(
        log_probs_T,
        rollout_log_probs_T=torch.tensor([-1.1, -9.0, -3.0]),
        advantages_T=torch.tensor([1.0, 5.0, -1.0]),
        loss_mask_T=torch.tensor([1.0, 0.0, 1.0]),
        ref_log_probs_T=torch.tensor([-1.2, -9.0, -2.5]),
        **arguments,
    )
    alone = policy_loss_sums(
        log_probs_T[[0, 2]],
        rollout_log_probs_T=torch.tensor([-1.1, -3.0]),
        advantages_T=torch.tensor([1.0, -1.0]),
        loss_mask_T=torch.ones(2),
        ref_log_probs_T=torch.tensor([-1.2, -2.5]),
        **arguments,
    )
    assert masked == alone
