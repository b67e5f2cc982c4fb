"""Checks of settings. Standard library only: client and configuration import it too."""

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
