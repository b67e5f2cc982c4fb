"""Truncated completions: counted, and excluded from the loss."""

from __future__ import annotations

import numpy as np
import pytest

from tasuki.client.truncation import has_loss_tokens, truncated_fraction, without_truncated
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
