"""Completions truncated at max_new_tokens: counting them and excluding them from the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasuki.client.types import FinishReason, Sample, TrainingSample


def truncated_fraction(samples: Sequence[Sample]) -> float:
    """Share of samples truncated at max_new_tokens; 0 without samples."""
    return sum(sample.finish_reason is FinishReason.LENGTH for sample in samples) / max(len(samples), 1)


def without_truncated(samples: Sequence[TrainingSample], finish_reasons: Sequence[FinishReason]) -> list[TrainingSample]:
    """Sets the loss mask to zeros for each sample that ended by LENGTH; other samples keep their mask.

    finish_reasons: one for each sample. A masked sample still counts in its group's baseline. The trainer refuses a call without
    counted tokens: see `has_loss_tokens`.
    Source: the overlong filtering of DAPO (arXiv:2503.14476) sec. 3.4.
    """
    return [
        replace(sample, loss_mask=np.zeros(len(sample.completion_token_ids), dtype=np.float32))
        if reason is FinishReason.LENGTH
        else sample
        for sample, reason in zip(samples, finish_reasons, strict=True)
    ]


def has_loss_tokens(samples: Sequence[TrainingSample]) -> bool:
    """Whether the loss counts at least one token of the samples."""
    return any(not len(sample.loss_mask) or bool(np.any(sample.loss_mask)) for sample in samples)
