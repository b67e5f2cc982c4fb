"""Settings of sampling and of advantages, and checks of settings. Standard library only: client and configuration import it too."""

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from numbers import Real
from typing import Any, Literal, TypeVar

GREATEST = 1e30
"""Trainers compute in float32."""


class SettingError(ValueError):
    """A setting out of range. `field` names it; `problem` says what is wrong and what is allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


_Enum = TypeVar("_Enum", bound=StrEnum)


def member(enum: type[_Enum], value: object, *, field: str) -> _Enum:
    """The enum member that `value` is or names. Raises SettingError naming `field` and the allowed values."""
    try:
        return enum(value)
    except ValueError:
        raise SettingError(field, f"is {value!r}; must be one of {', '.join(enum)}") from None


def check_number(
    field: str, value: Any, *, least: float = -GREATEST, most: float = GREATEST, above: float | None = None
) -> None:
    """Raises SettingError unless `value` is a number from `least`, or greater than `above`, to `most`."""
    if not _is_number(value) or not least <= value <= most or (above is not None and value <= above):
        low = f"from {least:g}" if above is None else f"greater than {above:g} and"
        raise SettingError(field, f"is {value!r:.40}; must be a number {low} {'to' if above is None else 'at most'} {most:g}")


def check_whole(field: str, value: Any, *, least: int, most: int) -> None:
    """Raises SettingError unless `value` is a whole number from `least` to `most`."""
    if not _is_number(value) or not least <= value <= most or value % 1:
        raise SettingError(field, f"is {value!r:.40}; must be a whole number from {least} to {most}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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

Std = Literal["none", "sample", "population"]
MAX_KL_ERROR = 0.2
"""Bound on a step's relative error for adapting kl_coef, which changes by at most this times samples / horizon."""
KL_HORIZON = 10_000.0
"""Samples over which an error of 20 % changes the coefficient of an adaptive KL penalty by 20 %."""


class Estimator(StrEnum):
    """Baseline of the advantages; tasuki.algorithms.advantages has the formulas."""

    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    GROUP_BASELINE_WHITENED = "group_baseline_whitened"
    GLOBALLY_WHITENED = "globally_whitened"
    GREEDY_BASELINE = "greedy_baseline"
    BATCH_BASELINE = "batch_baseline"
    RUNNING_BASELINE = "running_baseline"
    GAE = "gae"
    """Requires a critic."""

    @property
    def needs_groups(self) -> bool:
        """Whether groups of a single completion have no gradient."""
        return self in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT, Estimator.GROUP_BASELINE_WHITENED)
