"""Rewards: the user's function, run in worker processes, each sample under a time limit that is kept by killing the worker."""

from __future__ import annotations

import functools
import importlib
import math
import multiprocessing
import numbers
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import pebble
from numpy.typing import NDArray
from pebble.common.types import CONSTS

from tasuki.wire.errors import InvalidArgument, RewardFailed

# A worker's start: a new interpreter and the import of the reward's module.
_START_TIMEOUT_S = 60.0
_LOOK_FOR_PARENT_EVERY_S = 1.0
# A worker whose time is up gets SIGTERM and this long after it SIGKILL; pebble's own three seconds would be waited twice.
CONSTS.term_timeout = 0.1
_Answer = tuple[float, str]
"""Reward and an empty string, or NaN and what went wrong. A user's exception class need not exist on this side, so none crosses."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    rewards: NDArray[np.float32]
    """[N], one for each sample."""
    num_failed: int
    """Samples whose reward failed and counted as 0."""


class RewardPool:
    """Worker processes that score samples. Started once; use it in a `with` block, which ends them however it is left."""

    def __init__(
        self,
        function: str,
        *,
        folders: Sequence[Path] = (),
        num_workers: int = 1,
        timeout_s: float = 10.0,
        on_error: Literal["fail", "zero"] = "fail",
    ) -> None:
        """function: "module:function", called as function(prompt=..., completion=..., **other fields of the row) -> number.

        folders: searched for the module before the installed packages. timeout_s: for one sample.
        Raises InvalidArgument when the function cannot be imported.
        """
        module, separator, name = function.partition(":")
        if not (separator and module and name):
            raise InvalidArgument("reward.function", f'expected "module:function", got {function!r}')
        if timeout_s <= 0 or num_workers < 1:
            raise InvalidArgument("reward", f"timeout_s is {timeout_s} and num_workers {num_workers}; both must be positive")
        self._function, self._timeout_s, self._on_error = function, timeout_s, on_error
        self._source = (module, name, tuple(str(folder.absolute()) for folder in folders))
        # spawn: a forked child would inherit gRPC's threads and locks in an unknown state.
        self._pool = pebble.ProcessPool(
            num_workers, initializer=_prepare_worker, initargs=self._source, context=multiprocessing.get_context("spawn")
        )
        try:
            self._check_import()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, at once."""
        self._pool.stop()
        self._pool.join()

    def score(self, rows: Sequence[Mapping[str, object]], completions: Sequence[str], *, group_size: int = 1) -> Scores:
        """The reward of each completion. rows: [P]; completions: [P * group_size], those of the first row first.

        Raises RewardFailed naming sample, prompt and cause when a reward raises, hangs, kills its worker or is no finite number,
        unless such a sample counts as 0.
        """
        if len(completions) != len(rows) * group_size:
            raise InvalidArgument("completions", f"{len(completions)} for {len(rows)} rows of {group_size}")
        futures = [
            self._pool.schedule(
                _score, args=(*self._source, {**rows[index // group_size], "completion": completion}), timeout=self._timeout_s
            )
            for index, completion in enumerate(completions)
        ]
        rewards = np.zeros(len(completions), dtype=np.float32)
        num_failed = 0
        try:
            for index, future in enumerate(futures):
                reward, cause = self._outcome(future)
                if not cause:
                    rewards[index] = reward
                elif self._on_error == "zero":
                    num_failed += 1
                else:
                    raise self._failed(cause, sample=index, prompt=index // group_size)
        finally:
            for future in futures:
                future.cancel()
        return Scores(rewards, num_failed)

    def _outcome(self, future: pebble.ProcessFuture[_Answer]) -> _Answer:
        try:
            # Those before it are done, so this one runs or is next: more than a start and its own limit means a broken pool.
            return future.result(timeout=self._timeout_s + _START_TIMEOUT_S)
        except FutureTimeoutError:
            return math.nan, f"gave no answer within {self._timeout_s:g} s; its worker was killed"
        except pebble.ProcessExpired as error:
            return math.nan, f"ended its worker process (exit code {error.exitcode})"
        except RuntimeError as error:  # BrokenProcessPool: a worker died between two samples
            raise RewardFailed(f"reward {self._function}: the workers are gone: {error}", cause=error) from error

    def _check_import(self) -> None:
        future = self._pool.schedule(_import_problem, args=self._source)
        try:
            problem = future.result(timeout=_START_TIMEOUT_S)
        except FutureTimeoutError:
            problem = f"importing it takes longer than {_START_TIMEOUT_S:g} s"
        except (pebble.ProcessExpired, RuntimeError) as error:
            problem = f"importing it ended the worker process: {error}"
        if problem:
            raise InvalidArgument("reward.function", f"cannot use {self._function}: {problem}")

    def _failed(self, cause: str, *, sample: int, prompt: int) -> RewardFailed:
        text = f"reward {self._function} failed for sample {sample} (prompt {prompt}): {cause}"
        return RewardFailed(text, sample=sample, prompt=prompt, cause=cause)


@functools.cache
def _load(module: str, name: str, folders: tuple[str, ...]) -> Callable[..., object]:
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is {type(function).__name__}, not a function")
    return function


def _prepare_worker(module: str, name: str, folders: tuple[str, ...]) -> None:
    """Runs when a worker starts: no sample pays for the import, whose error, if any, comes back with the first sample."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with suppress(Exception):
        _load(module, name, folders)


def _end_with_parent(parent_pid: int) -> None:
    """A reward that hangs must not live on when the process that would have killed it was killed itself."""
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_FOR_PARENT_EVERY_S)
    os._exit(1)


def _import_problem(module: str, name: str, folders: tuple[str, ...]) -> str:
    try:
        _load(module, name, folders)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _score(module: str, name: str, folders: tuple[str, ...], arguments: dict[str, object]) -> _Answer:
    try:
        reward = _load(module, name, folders)(**arguments)
        if not isinstance(reward, numbers.Real | np.bool_):
            return math.nan, f"returned {type(reward).__name__}, not a number"
        value = float(reward)
    except BaseException as error:  # noqa: BLE001  the user's function may raise anything
        return math.nan, f"raised {type(error).__name__}: {error}"
    # Rewards are kept in float32.
    if not abs(value) <= float(np.finfo(np.float32).max):
        return math.nan, f"returned {value}, which is not finite"
    return value, ""
