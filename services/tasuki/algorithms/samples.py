"""Tokens of samples as table rows. Shape suffixes: N completion tokens, concatenated by sample; S samples; T longest sample."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
