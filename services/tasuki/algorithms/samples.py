"""Tokens of samples as rows of a table. Shape suffixes: N completion tokens, one sample after the other; S samples; T longest sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import SettingError

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


def check_shape(x: NDArray[Any], shape: tuple[int, ...], *, name: str) -> None:
    """Raises SettingError naming the array and both shapes where they differ."""
    if np.shape(x) != shape:
        raise SettingError(name, f"has shape {list(np.shape(x))}; must be {list(shape)}")


def sample_ids(num_completion_S: Integers) -> NDArray[np.int64]:
    """[N]: the sample of each token."""
    return np.repeat(np.arange(len(num_completion_S)), num_completion_S)


def counted_tokens(loss_mask_N: Floats, num_completion_S: Integers) -> NDArray[np.float64]:
    """[S]: counted tokens of each sample."""
    counted_S = np.bincount(sample_ids(num_completion_S), weights=loss_mask_N, minlength=len(num_completion_S))
    return counted_S.astype(np.float64, copy=False)  # bincount counts in integers where there is nothing to weigh


def to_rows(x_N: Floats, num_completion_S: Integers) -> NDArray[np.float64]:
    """[S, T] float64: a row for each sample, with zeros after its last token."""
    x_ST = np.zeros((len(num_completion_S), max(num_completion_S, default=0)))
    x_ST[_is_token(num_completion_S)] = x_N
    return x_ST


def from_rows(x_ST: Floats, num_completion_S: Integers) -> Floats:
    """[N]: the inverse of `to_rows`."""
    return x_ST[_is_token(num_completion_S)]


def _is_token(num_completion_S: Integers) -> NDArray[np.bool_]:
    return np.arange(max(num_completion_S, default=0)) < np.asarray(num_completion_S)[:, None]
