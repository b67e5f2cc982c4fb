"""DAPO's penalty for completions near the length limit. Shape suffix: S samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def soft_overlong_penalty(
    num_completion_S: NDArray[np.integer], *, max_completion_tokens: int, buffer_tokens: int
) -> NDArray[np.float32]:
    """[S]: added to the reward: 0 up to the buffer, then falling to -1 at `max_completion_tokens`, and -1 beyond.

    num_completion_S: [S] tokens of each completion; 0 < buffer_tokens <= max_completion_tokens.
    Source: DAPO (arXiv:2503.14476) eq. 13, with L_cache = buffer_tokens.
    """
    assert 0 < buffer_tokens <= max_completion_tokens
    excess_S = np.asarray(num_completion_S, dtype=np.float64) - (max_completion_tokens - buffer_tokens)
    return (0.0 - np.clip(excess_S / buffer_tokens, 0.0, 1.0)).astype(np.float32)
