"""The KL divergence to the reference as part of the reward.

Shape suffixes: N completion tokens, concatenated by sample; S samples.
"""

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import KlEstimator
from tasuki.algorithms.samples import Floats, Integers, check_shape, sample_ids
from tasuki.algorithms.setting import KL_HORIZON, MAX_KL_ERROR

# As in the loss: larger values carry no information.
_MAX_LOG_RATIO = 20.0


def kl_penalties(
    log_probs_N: Floats, ref_log_probs_N: Floats, *, estimator: KlEstimator = KlEstimator.K1
) -> NDArray[np.float64]:
    """[N]: estimate of KL(policy || reference) for each token. K3_STRAIGHT_THROUGH equals K3 here: in a reward only values matter.

    Source: Schulman (http://joschu.net/blog/kl-approx.html); k1 is the penalty of InstructGPT (arXiv:2203.02155) eq. 2.
    """
    check_shape(ref_log_probs_N, np.shape(log_probs_N), name="ref_log_probs_N")
    log_ratio_N = np.asarray(ref_log_probs_N, dtype=np.float64) - np.asarray(log_probs_N, dtype=np.float64)
    log_ratio_N = np.clip(log_ratio_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case KlEstimator.K1:
            return -log_ratio_N
        case KlEstimator.K2:
            return 0.5 * np.square(log_ratio_N)
        case KlEstimator.K3 | KlEstimator.K3_STRAIGHT_THROUGH:
            return np.expm1(log_ratio_N) - log_ratio_N


def token_rewards(
    rewards_S: Floats,
    penalties_N: Floats,
    num_completion_S: Integers,
    *,
    coef: float,
    loss_mask_N: Floats | None = None,
) -> NDArray[np.float32]:
    """[N]: minus `coef` times the penalty of each counted token, plus the sample's reward on its last counted token.

    rewards_S: [S], NaN for failed ones, which makes the last token's reward NaN; penalties_N: [N] from `kl_penalties`;
    num_completion_S: [S]. A sample without a counted token has no reward.
    Source: Ziegler et al. (arXiv:1909.08593) eq. 2.
    """
    is_counted_N = np.ones(len(penalties_N), dtype=bool) if loss_mask_N is None else np.asarray(loss_mask_N) > 0.0
    check_shape(rewards_S, (len(num_completion_S),), name="rewards_S")
    for name, x_N in (("penalties_N", penalties_N), ("loss_mask_N", is_counted_N)):
        check_shape(x_N, (int(np.sum(num_completion_S)),), name=name)
    rewards_N = np.where(is_counted_N, -coef * np.asarray(penalties_N, dtype=np.float64), 0.0)
    ids_N = sample_ids(num_completion_S)
    places = np.flatnonzero(is_counted_N)
    last_places = places[np.append(ids_N[places][1:] != ids_N[places][:-1], True)] if len(places) else places
    rewards_N[last_places] += np.asarray(rewards_S, dtype=np.float64)[ids_N[last_places]]
    return rewards_N.astype(np.float32)


def adapted_coef(coef: float, kl: float, *, target: float, num_samples: int) -> float:
    """The KL coefficient after a batch of `num_samples` with this mean KL divergence, in units of the target.

    Source: Ziegler et al. (arXiv:1909.08593) sec. 2.2; the horizon as in their code.
    """
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1.0 + error * num_samples / KL_HORIZON)
