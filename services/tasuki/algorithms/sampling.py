"""Ranges of sampling settings, for configuration, rollout and trainer alike. Standard library only."""

import math
from collections.abc import Callable, Mapping

GREEDY_BELOW = 1e-6
"""SGLang samples greedily below this temperature. Far below it logits are not finite once they are divided."""
LEAST_TEMPERATURE = 1e-5
"""Least temperature of a run that samples."""
RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "a whole number of tokens, at least 1"),
    "min_new_tokens": (lambda value: value >= 0, "a whole number of tokens, at least 0"),
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number, at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": (lambda value: value == -1 or value >= 1, "a whole number, -1 (off) or at least 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (lambda value: 0 < value <= 2, "a number in (0, 2]"),
}
"""Whether a value is allowed, and which are, by the name in SamplingParams."""
