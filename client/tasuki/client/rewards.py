"""Rewards: user functions run in worker processes. A time limit per sample is enforced by killing the worker."""

import math
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tasuki.client.dataset import row_place
from tasuki.client.encode import TokenIds
from tasuki.client.reward_worker import LARGEST_REWARD, Answer, Source, is_worker, judged
from tasuki.client.types import FinishReason, Sample
from tasuki.client.worker_process import WorkerEnded, WorkerProcess, Workers
from tasuki.wire.errors import InvalidArgument, RewardFailed


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
    def of(cls, sample: Sample, *, text: str, prompt_token_ids: TokenIds) -> "Completion":
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


Call = tuple[Source, dict[str, object], int | None]
"""A function, its arguments, and how many completions it scores; None if it takes one `completion`."""
_COMPLETION_ARGUMENTS = ("completion", "finish_reason", "num_tokens", "prompt_token_ids", "completion_token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rewards of N samples. A failed reward is 0 with on_error="zero" and NaN with "skip"."""

    rewards: NDArray[np.float32]
    """[N], the weighted sum; NaN if a reward with non-zero weight is NaN."""
    num_failed: int
    """Samples for which at least one reward failed."""
    by_name: Mapping[str, NDArray[np.float32]]
    """[N] for each reward, unweighted."""
    failures: Sequence[str] = ()
    """[N], why a sample's first failed reward failed, or an empty string."""

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

        A function that takes `completions` scores a group in one call, or the whole batch if it takes `prompts`, too. It returns a list
        of numbers, and gets lists with an entry for each completion; `prompt` is the group's one prompt.

        folders: searched for the module before the installed packages. timeout_s: for each call.
        Raises InvalidArgument when a function cannot be imported, or `folders` is not a sequence of paths.
        """
        if timeout_s <= 0 or num_workers < 1:
            raise InvalidArgument("reward", f"timeout_s is {timeout_s} and num_workers {num_workers}; both must be positive")
        if is_worker():
            text = 'a worker imports this script: it creates its RewardPool below `if __name__ == "__main__":`'
            raise InvalidArgument("reward.function", text)
        self._rewards = _named(function)
        self._timeout_s, self._on_error = timeout_s, on_error
        if isinstance(folders, str | Path) or not all(isinstance(folder, str | Path) for folder in folders):
            raise InvalidArgument("folders", f"must be a list of paths, not {folders!r}")
        self._sources: list[Source] = [source_of(reward.function, folders) for reward in self._rewards]
        functions = [reward.function for reward in self._rewards]
        self._workers = Workers(
            self._sources, functions, key="reward.function", num=num_workers, serves="tasuki.client.reward_worker"
        )
        self._signatures = self._workers.signatures

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and every process that their rewards have started, immediately."""
        self._workers.close()

    def check_rows(self, rows: Sequence[Mapping[str, object]], *, path: Path | str) -> None:
        """Raises InvalidArgument for an argument that neither a completion nor a row has, naming function and row. path: of their file."""
        for index, row in enumerate(rows):
            for reward, signature in zip(self._rewards, self._signatures, strict=True):
                others = () if signature.scope == "completion" else ("completions", "prompts")
                given = {*row, *_COMPLETION_ARGUMENTS, *others}
                missing = [name for name in signature.required if name not in given]
                if missing:
                    raise InvalidArgument(
                        "reward.function",
                        f"{reward.function} of {signature.file} takes `{missing[0]}`, but {row_place(path, index)} has only "
                        f"{', '.join(row)}; name the argument as a field, give it a default, or add the field",
                        argument=missing[0],
                    )

    def score(
        self,
        rows: Sequence[Mapping[str, object]],
        completions: Sequence[str] | Sequence[Completion],
        *,
        group_size: int = 1,
    ) -> Scores:
        """Scores each completion. rows: [P]; completions: [P * group_size], ordered by row.

        Raises RewardFailed naming sample, prompt and cause if a reward raises, times out, kills its worker or is no number up to 1e15.
        Depending on `on_error`, a failed reward counts as 0 or is skipped instead.
        """
        if len(completions) != len(rows) * group_size:
            raise InvalidArgument("completions", f"{len(completions)} for {len(rows)} rows of {group_size}")
        calls, places = self._calls(rows, completions, group_size)
        all_answers = self._workers.call(lambda is_over: self._answers(calls, is_over))
        values_NR = np.zeros((len(completions), len(self._rewards)), dtype=np.float32)
        failures = [""] * len(completions)
        for (start, reward), (*_, num), answers in zip(places, calls, all_answers, strict=True):
            each = answers if len(answers) > 1 else answers * (num or 1)  # one failure is that of the whole call
            for sample, (value, cause) in enumerate(each, start):
                if cause and self._on_error == "fail":
                    raise self._failed(cause, self._rewards[reward], sample=sample, prompt=sample // group_size)
                failures[sample] = failures[sample] or cause
                values_NR[sample, reward] = 0.0 if cause and self._on_error == "zero" else value
        return self._scores(values_NR, failures)

    def _answers(self, calls: Sequence[Call], is_over: threading.Event) -> list[list[Answer]]:
        """Answers in the order of the calls; with on_error="fail" those after the first failure may be missing."""
        answers: list[list[Answer]] = [[(math.nan, "")]] * len(calls)
        waiting, running = deque(range(len(calls))), dict[WorkerProcess, int]()
        try:
            while (waiting or running) and not is_over.is_set():
                for worker in [worker for worker in self._workers.started() if worker not in running]:
                    if waiting and self._asks(worker, calls[waiting[0]]):
                        running[worker] = waiting.popleft()
                for worker, answer, how in self._workers.told([*running, *self._workers.starting]):
                    if how:
                        self._workers.replace_ended(worker, how)
                    if worker in running:
                        index = running.pop(worker)
                        answers[index] = [(math.nan, how)] if how else _judged(answer, calls[index][2] or 1)
                        if self._on_error == "fail" and any(cause for _, cause in answers[index]):
                            waiting.clear()  # those before it are running or done
        finally:
            for worker in running:
                self._workers.replace(worker)
        return answers

    def _asks(self, worker: WorkerProcess, call: Call) -> bool:
        """Returns False, with another worker on its way, if this one was killed between two calls, as by the kernel without memory."""
        try:
            worker.ask(call, timeout_s=self._timeout_s)
        except WorkerEnded:
            self._workers.replace(worker)
            return False
        return True

    def _calls(
        self, rows: Sequence[Mapping[str, object]], completions: Sequence[str] | Sequence[Completion], group_size: int
    ) -> tuple[list[Call], list[tuple[int, int]]]:
        """The calls with only the arguments that their functions take, and of each its first sample and its reward."""
        known = [
            {**rows[index // group_size], **(one.arguments() if isinstance(one, Completion) else {"completion": one})}
            for index, one in enumerate(completions)
        ]
        sizes = {"completion": 1, "group": group_size, "batch": max(1, len(known))}
        calls: list[Call] = []
        places = sorted(
            (start, reward)
            for reward, signature in enumerate(self._signatures)
            for start in range(0, len(known), sizes[signature.scope])
        )
        for start, reward in places:
            signature, is_one = self._signatures[reward], self._signatures[reward].scope == "completion"
            part = known[start : start + sizes[signature.scope]]
            arguments = part[0] if is_one else _listed(part, signature.scope)
            taken = arguments if signature.taken is None else signature.taken
            wanted = {name: value for name, value in arguments.items() if name in taken}
            calls.append((self._sources[reward], wanted, None if is_one else len(part)))
        return calls, places

    def _scores(self, values_NR: NDArray[np.float32], failures: Sequence[str]) -> Scores:
        weights_R = np.array([reward.weight for reward in self._rewards])
        # Rewards of weight 0 are left out: their NaN must not skip a sample.
        summed_N = (values_NR.astype(np.float64) * weights_R)[:, weights_R != 0].sum(axis=1)
        overflows_N = np.abs(summed_N) > LARGEST_REWARD
        if overflows_N.any():
            sample = int(overflows_N.argmax())
            cause = f"the weighted sum {summed_N[sample]:g} is beyond {LARGEST_REWARD:g}"
            raise RewardFailed(f"rewards of sample {sample}: {cause}; lower the weights", sample=sample, cause=cause)
        return Scores(
            summed_N.astype(np.float32),
            sum(map(bool, failures)),
            {reward.name: values_NR[:, index] for index, reward in enumerate(self._rewards)},
            failures,
        )

    def _failed(self, cause: str, reward: NamedReward, *, sample: int, prompt: int) -> RewardFailed:
        text = f"reward {reward.function} failed for sample {sample} (prompt {prompt}): {cause}"
        return RewardFailed(text, sample=sample, prompt=prompt, cause=cause, reward=reward.name)


def _judged(answer: Any, num: int) -> list[Answer]:
    with suppress(TypeError):  # it has another form
        each = [judged(*one) for one in answer]
        if len(each) == num or (len(each) == 1 and each[0][1]):
            return each
    return [(math.nan, f"made its worker answer {answer!r:.80}; does its code replace functions of Python?")]


def _listed(part: Sequence[Mapping[str, object]], scope: str) -> dict[str, object]:
    """Arguments of a function that scores several completions: a list for each, None where a row lacks the field."""
    lists: dict[str, object] = {name: [one.get(name) for one in part] for name in {name: None for one in part for name in one}}
    lists["completions"] = lists.pop("completion")
    if scope == "batch":
        lists["prompts"] = lists.pop("prompt", None)
    else:
        lists["prompt"] = part[0].get("prompt")
    return lists


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


def source_of(function: str, folders: Sequence[Path | str]) -> Source:
    """A script's own functions are imported from its file."""
    (module, name), paths = _split(function), tuple(str(Path(folder).absolute()) for folder in folders)
    file = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    return (module, name, paths) if file is None else (Path(file).stem, name, (str(Path(file).absolute().parent), *paths))


def _split(function: object) -> tuple[str, str]:
    if not isinstance(function, str):
        problem = f'expected "module:function", got {function!r}; put the function into a file, from which workers import it'
        raise InvalidArgument("reward.function", problem)
    module, separator, name = function.partition(":")
    if not (separator and module and name):
        raise InvalidArgument("reward.function", f'expected "module:function", got {function!r}')
    return module, name
