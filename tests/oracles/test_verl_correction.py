"""Correction of rollout probabilities against verl's functions."""

from __future__ import annotations

import pytest
import torch
from padded_cases import SEEDS, SMALL_GAPS, assert_same, loss_batch, padded
from verl.trainer.ppo import rollout_corr_helper

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.objective import correction_weights


@pytest.mark.parametrize(
    ("correction", "level", "threshold"),
    [
        (Correction(), "token", 2.0),
        (Correction(token_truncation=1.1), "token", 1.1),
        (Correction(token_truncation=None, sequence_truncation=2.0), "sequence", 2.0),
        (Correction(token_truncation=5.0, token_mask=(0.5, 5.0)), "token", "0.5_5.0"),
        (Correction(token_truncation=1.3, token_mask=(0.7, 1.3)), "token", "0.7_1.3"),
    ],
    ids=str,
)
def test_weights(correction: Correction, level: str, threshold: float | str) -> None:
    config = LossConfig(old_policy=OldPolicy.GIVEN, correction=correction)
    for seed in SEEDS:
        case = padded(seed, group_size=4, spreads=SMALL_GAPS)  # with every weight masked, verl divides by 0 in a metric
        theirs_ST, _ = rollout_corr_helper.compute_rollout_correction_weights(
            case.old_log_probs_ST - case.rollout_log_probs_ST, case.mask_ST, level, threshold
        )
        batch = loss_batch(case, config)
        ours = correction_weights(config, log_probs_N=case.flat(case.log_probs_ST), batch=batch)
        assert_same(ours.weights_N * batch.loss_mask_N, case.flat(theirs_ST))


@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.9, 1.05), (0.99, 1.3)])
@pytest.mark.parametrize("option", ["token_k1", "seq_mean_k1"])
@pytest.mark.parametrize("old_policy", [OldPolicy.GIVEN, OldPolicy.CURRENT, OldPolicy.ROLLOUT])
def test_masks(bounds: tuple[float, float], option: str, old_policy: OldPolicy) -> None:
    """verl's bounds are those of rollout / trainer, the inverse of tasuki's."""
    masks = {"token_mask" if option == "token_k1" else "geometric_mask": bounds}
    config = LossConfig(old_policy=old_policy, correction=Correction(token_truncation=None, **masks))
    for seed in SEEDS:
        case = padded(seed)
        trainer_ST = case.old_log_probs_ST if old_policy is OldPolicy.GIVEN else case.log_probs_ST
        theirs_ST, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            trainer_ST - case.rollout_log_probs_ST, case.mask_ST, option, f"{1 / bounds[1]}_{1 / bounds[0]}"
        )
        batch = loss_batch(case, config)
        ours = correction_weights(config, log_probs_N=case.flat(case.log_probs_ST), batch=batch)
        assert torch.equal(ours.weights_N * batch.loss_mask_N, case.flat(theirs_ST))
