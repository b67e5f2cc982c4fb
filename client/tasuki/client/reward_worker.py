"""Code run in a reward's worker process: imports the user's function and calls it."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import numbers
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

Source = tuple[str, str, tuple[str, ...]]
"""Module, function, and folders searched before the installed packages."""
Answer = tuple[float, str]
"""Reward and an empty string, or NaN and the error's text. Exceptions are not passed: their class may not exist in the client."""
_LOOK_FOR_PARENT_EVERY_S = 1.0
_TOLD_CHARACTERS = 1000
_TOKEN_IDS = ("prompt_token_ids", "completion_token_ids")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def prepare(sources: Sequence[Source]) -> None:
    """Imports the functions when a worker starts, so that no sample pays for it. Import errors are reported with the first sample."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    for source in sources:
        with suppress(Exception, SystemExit):
            _load(*source)


def read_parameters(*source: *Source) -> tuple[str, frozenset[str] | None]:
    """Why the function is unusable, or an empty string; and its parameter names, None if it takes any."""
    try:
        parameters = inspect.signature(_load(*source)).parameters.values()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything
        return _told(error), frozenset()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return "", None
    return "", frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)


def score(source: Source, arguments: dict[str, object]) -> Answer:
    """Calls the function for one sample."""
    try:
        reward = _load(*source)(**{name: _plain(name, value) for name, value in arguments.items()})
        if not isinstance(reward, numbers.Real | np.bool_):
            return math.nan, f"returned {type(reward).__name__}, not a number"
        value = float(reward)
    except BaseException as error:  # noqa: BLE001  the user's function may raise anything
        return math.nan, f"raised {_told(error)}"
    # Rewards are kept in float32.
    if not abs(value) <= float(np.finfo(np.float32).max):
        return math.nan, f"returned {value}, which is not finite"
    return value, ""


def _told(error: BaseException) -> str:
    """The error as one printable line of bounded length; model output may be in its text."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001  so may its own text
        text = f"its text raised {type(another).__name__}"
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:_TOLD_CHARACTERS])
    return f"{type(error).__name__}: {shown}{'...' if len(text) > _TOLD_CHARACTERS else ''}"


@functools.cache
def _load(module: str, name: str, folders: tuple[str, ...]) -> Callable[..., object]:
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is {type(function).__name__}, not a function")
    return function


def _plain(name: str, value: object) -> object:
    """Converts token ids to a list."""
    return value.tolist() if name in _TOKEN_IDS and isinstance(value, np.ndarray) else value


def _end_with_parent(parent_pid: int) -> None:
    """Kills the worker when its parent dies, since a reward that hangs would otherwise live on."""
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_FOR_PARENT_EVERY_S)
    os._exit(1)
