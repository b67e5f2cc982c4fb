"""Weights of tokens in a loss, chosen so that the split of a batch into calls, ranks and micro-batches does not change the loss.

Shape suffixes: N completion tokens, concatenated by sample; S samples.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.algorithms.setting import SettingError

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


def check_shape(x: NDArray[Any], shape: tuple[int, ...], *, name: str) -> None:
    """Raises SettingError naming the array and both shapes if they differ."""
    if np.shape(x) != shape:
        raise SettingError(name, f"has shape {list(np.shape(x))}; must be {list(shape)}")


def sample_ids(num_completion_S: Integers) -> NDArray[np.int64]:
    """[N]: index of each token's sample."""
    return np.repeat(np.arange(len(num_completion_S)), num_completion_S)


def counted_tokens(loss_mask_N: Floats, num_completion_S: Integers) -> NDArray[np.float64]:
    """[S]: number of counted tokens in each sample."""
    counted_S = np.bincount(sample_ids(num_completion_S), weights=loss_mask_N, minlength=len(num_completion_S))
    return counted_S.astype(np.float64, copy=False)  # without weights bincount returns integers


def to_rows(x_N: Floats, num_completion_S: Integers) -> NDArray[np.float64]:
    """[S, T] float64: one row per sample, zero-padded."""
    x_ST = np.zeros((len(num_completion_S), max(num_completion_S, default=0)))
    x_ST[_is_token(num_completion_S)] = x_N
    return x_ST


def from_rows(x_ST: Floats, num_completion_S: Integers) -> Floats:
    """[N]: the inverse of `to_rows`."""
    return x_ST[_is_token(num_completion_S)]


def _is_token(num_completion_S: Integers) -> NDArray[np.bool_]:
    return np.arange(max(num_completion_S, default=0)) < np.asarray(num_completion_S)[:, None]


def denominator(loss_mask_N: NDArray[np.floating], num_completion_S: NDArray[np.integer], *, config: LossConfig) -> float:
    """Divisor of every token weight of the call: `config.denominator`, or else the call's own count.

    Counted tokens for the token mean; sequences with a counted token for the sequence means; all sequences times
    `aggregation_length` for the constant.
    Source: DAPO (arXiv:2503.14476) eq. 8, GRPO (arXiv:2402.03300) eq. 3, Dr. GRPO (arXiv:2503.20783) sec. 3.2.
    """
    if config.denominator is not None:
        return config.denominator
    match config.aggregation:
        case Aggregation.TOKEN_MEAN:
            return float(np.asarray(loss_mask_N).sum(dtype=np.float64))
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM | Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return float(np.count_nonzero(counted_tokens(loss_mask_N, num_completion_S)))
        case Aggregation.CONSTANT:
            assert config.aggregation_length is not None
            return float(len(num_completion_S) * config.aggregation_length)


def call_denominator(
    loss_masks: Sequence[Sequence[float]], num_completion_tokens: Sequence[int], *, config: LossConfig
) -> float:
    """`denominator` of samples given one by one. loss_masks: of each sample; empty if all its tokens count."""
    masks = [mask or [1.0] * length for mask, length in zip(loss_masks, num_completion_tokens, strict=True)]
    mask_N = np.fromiter(chain.from_iterable(masks), dtype=np.float64)
    return denominator(mask_N, np.asarray(num_completion_tokens, dtype=np.int64), config=config)


def token_weights(
    loss_mask_N: NDArray[np.floating], num_completion_S: NDArray[np.integer], *, config: LossConfig, denominator: float
) -> NDArray[np.float32]:
    """[N]: the weight of each token's loss, independent of the other samples in the micro-batch.

    loss_mask_N: [N], 0 and 1; num_completion_S: [S] tokens of each sample, summing to N; `denominator`: from the function of that
    name, for the whole call. All zero if no token of the call counts.
    """
    mask_N = np.asarray(loss_mask_N, dtype=np.float64)
    if denominator == 0.0:
        return np.zeros(len(mask_N), dtype=np.float32)
    if config.aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        mask_N = mask_N / np.repeat(np.maximum(counted_tokens(mask_N, num_completion_S), 1.0), num_completion_S)
    return (mask_N / denominator).astype(np.float32)
