"""Sampling of a step: dynamic sampling and truncated completions."""

import numpy as np
import pytest

from tasuki.client.estimation import Group, has_loss_tokens, without_truncated
from tasuki.client.step import truncated_fraction
from tasuki.client.types import FinishReason, Sample, TrainingSample


def _sample(reason: FinishReason) -> Sample:
    return Sample(0, 0, np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32), reason, 0)


def test_a_truncated_completion_is_masked_and_the_others_keep_their_mask():
    samples = [
        TrainingSample([1], [2, 3], advantages=1.0),
        TrainingSample([1], [2, 3], advantages=1.0),
        TrainingSample([1], [2, 3], loss_mask=[0, 1]),
        TrainingSample([1], [2, 3], loss_mask=[0, 1]),
    ]
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CUT, FinishReason.LENGTH]
    masked = without_truncated(samples, reasons)
    assert [list(sample.loss_mask) for sample in masked] == [[], [0, 0], [0, 1], [0, 0]]
    assert [sample.advantages for sample in masked[:2]] == [1.0, 1.0]
    assert has_loss_tokens(masked) and not has_loss_tokens([masked[1], masked[3]])
    with pytest.raises(ValueError):
        without_truncated(samples, reasons[:2])


def test_the_truncated_share_counts_length_alone():
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.CUT, FinishReason.LENGTH]
    assert truncated_fraction([_sample(reason) for reason in reasons]) == 0.5
    assert truncated_fraction([]) == 0.0


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        ([1, 1, 1], False),
        ([1, 0, 1], True),
        ([1, NAN, 1], False),
        ([1, NAN, 0], True),
        ([1, NAN, NAN], False),
        ([NAN] * 3, False),
    ],
)
def test_a_group_differs_by_the_rewards_that_count(rewards: list[float], differs: bool):
    assert Group([1], [], np.float32(rewards)).differs() is differs
