"""Checks of settings. Standard library only: client and configuration import it too."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from numbers import Real
from typing import Any, TypeVar

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


Row = tuple[str, object, object, bool, str]
"""A setting's name, value and default, whether it has an effect, and what would give it one."""


def check_effects(rows: Iterable[Row]) -> None:
    """Raises SettingError naming the first setting that differs from its default but has no effect.

    A coefficient or count of 0 switches something off. Its settings may stay, so that one key switches it on again.
    """
    for name, value, default, has_effect, needed in rows:
        if value != default and not has_effect:
            raise SettingError(name, f"is {value!s}, which has no effect: {needed}, or remove it")


def check_evaluation(
    *, has_prompts: bool, needed: str, eval_every: int | None, stop_at_eval_score: float | None = None, evaluation: bool = False
) -> None:
    """Raises SettingError naming an evaluation setting if there is no held-out data. evaluation: whether its settings are given."""
    check_effects(
        (
            ("eval_every", eval_every, None, has_prompts, needed),
            ("stop_at_eval_score", stop_at_eval_score, None, has_prompts, needed),
            ("eval", evaluation, False, has_prompts, needed),
        )
    )
