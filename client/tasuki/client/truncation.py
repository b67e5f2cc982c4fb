"""Completions that reached max_new_tokens: how many there are, and how to leave them out of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasuki.client.types import FinishReason, Sample, TrainingSample


def truncated_fraction(samples: Sequence[Sample]) -> float:
    """Share of the samples that were stopped by max_new_tokens; 0 without samples."""
    return sum(sample.finish_reason is FinishReason.LENGTH for sample in samples) / max(len(samples), 1)


def without_truncated(samples: Sequence[TrainingSample], finish_reasons: Sequence[FinishReason]) -> list[TrainingSample]:
    """The samples, with a loss mask of zeros for each that ended by LENGTH; the others keep their own mask.

    finish_reasons: one for each sample. A masked sample keeps its place in the group's baseline. The trainer refuses a call whose
    tokens are all masked: see `has_loss_tokens`.
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
