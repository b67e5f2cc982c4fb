"""Rewards: user functions run in worker processes. A time limit per sample is enforced by killing the worker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import pebble
from numpy.typing import NDArray
from pebble.common.types import CONSTS

from tasuki.client import reward_worker
from tasuki.client.aside import Aside
from tasuki.client.encode import TokenIds
from tasuki.client.pipe_lock import PipeLockContext
from tasuki.client.reward_worker import Answer, Source
from tasuki.client.types import FinishReason, Sample
from tasuki.wire.errors import InvalidArgument, RewardFailed

# Time for a worker to start: a new interpreter and the import of the reward's module.
_START_TIMEOUT_S = 60.0
# Delay between SIGTERM and SIGKILL for a worker over its limit. pebble's default of three seconds would be waited twice.
CONSTS.term_timeout = 0.1
_MAIN_HINT = '; a script creates its RewardPool below `if __name__ == "__main__":`, since each worker imports the script'


@dataclass(frozen=True, slots=True)
class NamedReward:
    """One of several rewards in a weighted sum."""

    name: str
    function: str
    """"module:function", as in RewardPool."""
    weight: float = 1.0
    """0 reports the reward without training on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion with the further fields that a reward function may take."""

    text: str
    finish_reason: FinishReason
    token_ids: TokenIds
    prompt_token_ids: TokenIds

    @classmethod
    def of(cls, sample: Sample, *, text: str, prompt_token_ids: TokenIds) -> Completion:
        return cls(text, sample.finish_reason, sample.token_ids, prompt_token_ids)

    def arguments(self) -> dict[str, object]:
        """Arguments of the reward function by name, without those from the row."""
        return {
            "completion": self.text,
            "finish_reason": self.finish_reason.lower(),
            "num_tokens": len(self.token_ids),
            "prompt_token_ids": self.prompt_token_ids,
            "completion_token_ids": self.token_ids,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rewards of N samples. A failed reward is 0 with on_error="zero" and NaN with "skip"."""

    rewards: NDArray[np.float32]
    """[N], the weighted sum; NaN if a reward with non-zero weight is NaN."""
    num_failed: int
    """Samples for which at least one reward failed."""
    by_name: Mapping[str, NDArray[np.float32]]
    """[N] for each reward, unweighted."""

    def mean(self) -> float | None:
        """Mean of the rewards that are not NaN; None if all are."""
        counted = self.rewards[~np.isnan(self.rewards)]
        return float(counted.mean()) if len(counted) else None


class RewardPool:
    """Worker processes that score samples. Use it in a `with` block, which ends them on exit."""

    def __init__(
        self,
        function: str | Sequence[NamedReward],
        *,
        folders: Sequence[Path | str] = (),
        num_workers: int = 1,
        timeout_s: float = 10.0,
        on_error: Literal["fail", "zero", "skip"] = "fail",
    ) -> None:
        """function: "module:function", or several with names and weights. A function returns a number. Its parameters are passed by
        keyword: `prompt` and the other fields of the row, `completion`, and, for a Completion, `finish_reason` ("stop",
        "length" or "cut"), `num_tokens`, `prompt_token_ids` and `completion_token_ids`.

        folders: searched for the module before the installed packages. timeout_s: for each call.
        Raises InvalidArgument when a function cannot be imported, or `folders` is not a sequence of paths.
        """
        if timeout_s <= 0 or num_workers < 1:
            raise InvalidArgument("reward", f"timeout_s is {timeout_s} and num_workers {num_workers}; both must be positive")
        self._rewards = _named(function)
        self._timeout_s, self._on_error = timeout_s, on_error
        if isinstance(folders, str | Path) or not all(isinstance(folder, str | Path) for folder in folders):
            raise InvalidArgument("folders", f"must be a list of paths, not {folders!r}")
        paths = tuple(str(Path(folder).absolute()) for folder in folders)
        self._sources: list[Source] = [(*_split(reward.function), paths) for reward in self._rewards]
        self._num_workers = num_workers
        self._pool = self._new_pool()
        self._aside = Aside("tasuki-rewards")
        try:
            self._taken = self._aside.call(self._read_parameters)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _new_pool(self) -> pebble.ProcessPool:
        # spawn, since a forked child would inherit gRPC's threads and locks in an unknown state.
        return pebble.ProcessPool(
            self._num_workers, initializer=reward_worker.prepare, initargs=(self._sources,), context=PipeLockContext()
        )

    def close(self) -> None:
        """Ends the workers immediately."""
        self._pool.stop()
        self._pool.join()
        self._aside.close()

    def score(
        self,
        rows: Sequence[Mapping[str, object]],
        completions: Sequence[str] | Sequence[Completion],
        *,
        group_size: int = 1,
    ) -> Scores:
        """Scores each completion. rows: [P]; completions: [P * group_size], ordered by row.

        Raises RewardFailed naming sample, prompt and cause if a reward raises, times out, kills its worker or is not finite.
        Depending on `on_error`, a failed reward counts as 0 or is skipped instead.
        """
        if len(completions) != len(rows) * group_size:
            raise InvalidArgument("completions", f"{len(completions)} for {len(rows)} rows of {group_size}")
        futures: list[pebble.ProcessFuture[Answer]] = []
        try:
            return self._aside.call(lambda: self._gather(futures, rows, completions, group_size))
        finally:
            for future in futures:
                future.cancel()

    def _gather(
        self,
        futures: list[pebble.ProcessFuture[Answer]],
        rows: Sequence[Mapping[str, object]],
        completions: Sequence[str] | Sequence[Completion],
        group_size: int,
    ) -> Scores:
        """Fills `futures`, which the caller may cancel, and waits for them.

        A worker that is killed between two samples breaks the pool, for example by the kernel without memory. New workers then score all.
        """
        try:
            return self._gather_once(futures, rows, completions, group_size)
        except _PoolBroken:
            self._pool.stop()
            self._pool.join()
            self._pool = self._new_pool()
            futures.clear()
        try:
            return self._gather_once(futures, rows, completions, group_size)
        except _PoolBroken as error:
            raise RewardFailed(f"the reward workers were killed twice: {error}", cause=str(error)) from error

    def _gather_once(
        self,
        futures: list[pebble.ProcessFuture[Answer]],
        rows: Sequence[Mapping[str, object]],
        completions: Sequence[str] | Sequence[Completion],
        group_size: int,
    ) -> Scores:
        """Raises _PoolBroken."""
        futures.extend(
            self._scheduled(source, arguments)
            for index, completion in enumerate(completions)
            for source, arguments in self._calls(rows[index // group_size], completion)
        )
        values_NR = np.zeros((len(completions), len(self._rewards)), dtype=np.float32)
        has_failed_NR = np.zeros(values_NR.shape, dtype=np.bool_)
        for place, future in zip(np.ndindex(values_NR.shape), futures, strict=True):
            value, cause = self._outcome(future)
            if cause and self._on_error == "fail":
                raise self._failed(cause, self._rewards[place[1]], sample=place[0], prompt=place[0] // group_size)
            has_failed_NR[place] = bool(cause)
            values_NR[place] = 0.0 if cause and self._on_error == "zero" else value
        return self._scores(values_NR, has_failed_NR)

    def _calls(self, row: Mapping[str, object], completion: str | Completion) -> list[tuple[Source, dict[str, object]]]:
        """One call for each reward, with only the arguments it takes."""
        known = {**row, **(completion.arguments() if isinstance(completion, Completion) else {"completion": completion})}
        return [
            (source, known if taken is None else {name: value for name, value in known.items() if name in taken})
            for source, taken in zip(self._sources, self._taken, strict=True)
        ]

    def _scores(self, values_NR: NDArray[np.float32], has_failed_NR: NDArray[np.bool_]) -> Scores:
        weights_R = np.array([reward.weight for reward in self._rewards])
        # Rewards of weight 0 are left out: their NaN must not skip a sample.
        summed_N = (values_NR.astype(np.float64) * weights_R)[:, weights_R != 0].sum(axis=1)
        overflows_N = np.abs(summed_N) > np.finfo(np.float32).max
        if overflows_N.any():
            sample = int(overflows_N.argmax())
            cause = f"the weighted sum {summed_N[sample]:g} is too large for float32"
            raise RewardFailed(f"rewards of sample {sample}: {cause}; lower the weights", sample=sample, cause=cause)
        return Scores(
            summed_N.astype(np.float32),
            int(has_failed_NR.any(axis=1).sum()),
            {reward.name: values_NR[:, index] for index, reward in enumerate(self._rewards)},
        )

    def _scheduled(self, source: Source, arguments: dict[str, object]) -> pebble.ProcessFuture[Answer]:
        try:
            return self._pool.schedule(reward_worker.score, args=(source, arguments), timeout=self._timeout_s)
        except RuntimeError as error:
            raise _PoolBroken(str(error)) from error

    def _outcome(self, future: pebble.ProcessFuture[Answer]) -> Answer:
        try:
            # Earlier calls are done, so this one runs or is next. Waiting longer than a start plus its limit means a broken pool.
            return future.result(timeout=self._timeout_s + _START_TIMEOUT_S)
        except FutureTimeoutError:
            return math.nan, f"gave no answer within {self._timeout_s:g} s; its worker was killed"
        except pebble.ProcessExpired as error:
            return math.nan, f"ended its worker process (exit code {error.exitcode})"
        except RuntimeError as error:  # BrokenProcessPool
            raise _PoolBroken(str(error)) from error

    def _read_parameters(self) -> list[frozenset[str] | None]:
        return [self._parameters(reward.function, source) for reward, source in zip(self._rewards, self._sources, strict=True)]

    def _parameters(self, function: str, source: Source) -> frozenset[str] | None:
        """Parameter names of the function; None if it takes any."""
        future = self._pool.schedule(reward_worker.read_parameters, args=source)
        taken = None
        try:
            problem, taken = future.result(timeout=_START_TIMEOUT_S)
        except FutureTimeoutError:
            problem = f"importing it took longer than {_START_TIMEOUT_S:g} s"
        except (pebble.ProcessExpired, RuntimeError) as error:
            problem = f"importing it ended the worker process: {error}{_MAIN_HINT}"
        if problem:
            raise InvalidArgument("reward.function", f"cannot use {function}: {problem}")
        return taken

    def _failed(self, cause: str, reward: NamedReward, *, sample: int, prompt: int) -> RewardFailed:
        text = f"reward {reward.function} failed for sample {sample} (prompt {prompt}): {cause}"
        return RewardFailed(text, sample=sample, prompt=prompt, cause=cause, reward=reward.name)


class _PoolBroken(Exception):
    """pebble gives the pool up."""


def _named(function: str | Sequence[NamedReward]) -> tuple[NamedReward, ...]:
    if callable(function):
        _split(function)
    if isinstance(function, str):
        return (NamedReward(_split(function)[1], function),)
    names = [reward.name for reward in function]
    if not names or not all(names) or len(set(names)) < len(names):
        raise InvalidArgument("reward.name", f"got {names}; give at least one reward, each with its own name")
    weights = [reward.weight for reward in function]
    if not any(weights) or not all(map(math.isfinite, weights)):
        raise InvalidArgument("reward.weight", f"got {weights}; give finite numbers, at least one other than 0")
    return tuple(function)


def _split(function: object) -> tuple[str, str]:
    if not isinstance(function, str):
        problem = f'expected "module:function", got {function!r}; put the function into a file, from which workers import it'
        raise InvalidArgument("reward.function", problem)
    module, separator, name = function.partition(":")
    if not (separator and module and name):
        raise InvalidArgument("reward.function", f'expected "module:function", got {function!r}')
    return module, name
