"""Random batches in both forms: padded rows as in verl and TRL, and packed tokens as in tasuki. All in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasuki.algorithms import aggregation
from tasuki.algorithms.batch import LossBatch
from tasuki.algorithms.loss_types import LossConfig

NUM_CASES = 300
SEEDS = range(NUM_CASES)
SMALL_GAPS = (0.05, 0.3)


@dataclass(frozen=True)
class Padded:
    """Tensors of shape [S, T] unless stated. Every sample has a counted token, and the batch has at least two."""

    num_completion_S: np.ndarray
    mask_ST: Tensor
    log_probs_ST: Tensor
    old_log_probs_ST: Tensor
    rollout_log_probs_ST: Tensor
    ref_log_probs_ST: Tensor
    advantages_ST: Tensor
    values_ST: Tensor
    rewards_ST: Tensor
    """0 where the mask is 0."""

    @property
    def is_token_ST(self) -> Tensor:
        return torch.arange(self.mask_ST.shape[1]) < torch.tensor(self.num_completion_S)[:, None]

    def flat(self, x_ST: Tensor) -> Tensor:
        return x_ST[self.is_token_ST]


def padded(
    seed: int, *, group_size: int = 1, sequence_advantages: bool = False, spreads: tuple[float, ...] = (0.05, 0.3, 1.0)
) -> Padded:
    """`spreads`: gaps between policies, in nats; one is drawn for the batch."""
    generator = np.random.default_rng(seed)
    num_samples = group_size * int(generator.integers(2, 5))
    num_completion_S = generator.integers(1, 9, num_samples)
    shape = (num_samples, int(num_completion_S.max()))
    is_token_ST = np.arange(shape[1]) < num_completion_S[:, None]
    mask_ST = is_token_ST & (generator.random(shape) < 0.7)
    mask_ST[np.arange(num_samples), num_completion_S - 1] = True
    spread = generator.choice(spreads)
    log_probs_ST = -generator.exponential(1.0, shape)
    advantages_ST = generator.normal(size=(num_samples, 1) if sequence_advantages else shape) * np.ones(shape)

    def near() -> np.ndarray:
        return log_probs_ST + spread * generator.normal(size=shape)

    arrays = (mask_ST, log_probs_ST, near(), near(), near(), advantages_ST)
    more = (generator.normal(size=shape), generator.normal(size=shape) * mask_ST)
    return Padded(num_completion_S, *(torch.tensor(array, dtype=torch.float64) for array in (*arrays, *more)))


def loss_batch(case: Padded, config: LossConfig) -> LossBatch:
    mask_N = case.flat(case.mask_ST)
    total = aggregation.denominator(mask_N.numpy(), case.num_completion_S, config=config)
    # Exact weights: those of `token_weights` are float32, and comparing them would only show their rounding.
    weights_N = _exact_weights(mask_N.numpy(), case.num_completion_S, config=config, denominator=total)
    return LossBatch(
        cu_seqlens_S=torch.tensor([0, *np.cumsum(case.num_completion_S)]),
        weights_N=torch.tensor(weights_N),
        loss_mask_N=mask_N,
        is_current_N=torch.ones(len(mask_N), dtype=torch.bool),
        rollout_log_probs_N=case.flat(case.rollout_log_probs_ST),
        old_log_probs_N=case.flat(case.old_log_probs_ST),
        advantages_N=case.flat(case.advantages_ST),
        ref_log_probs_N=case.flat(case.ref_log_probs_ST),
        values_N=case.flat(case.values_ST),
        returns_N=case.flat(case.rewards_ST),
    )


def _exact_weights(mask_N: np.ndarray, num_completion_S: np.ndarray, *, config: LossConfig, denominator: float) -> np.ndarray:
    weights_N = aggregation.token_weights(mask_N, num_completion_S, config=config, denominator=denominator)
    # Weights are 1 / integer, so rounding their inverse recovers them.
    counted = weights_N > 0
    exact_N = np.zeros(len(weights_N))
    exact_N[counted] = 1.0 / np.rint(1.0 / weights_N[counted].astype(np.float64))
    np.testing.assert_allclose(exact_N, weights_N, rtol=1e-6)
    return exact_N


def assert_same(ours: Tensor, theirs: Tensor, *, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)
