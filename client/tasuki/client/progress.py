"""Progress of a run: which part of a step runs, how much of it is done, and the time left."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from tasuki.client.step import Step

RESTARTED = "rollout has restarted: the call is repeated"
_RECENT_STEPS = 32
"""Finished steps that estimate those to come, by the mean of their middle half: some may have outlasted a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """What a run is doing. `progress.json` of the output folder has these fields while the run's command lives."""

    activity: str
    """Part of a step, as in its `seconds`, such as "evaluate", "generate", "reward" or "to_train"; "start" until the node is up and the
    run begins, "export" while the model is written, "stop" until its node has ended."""
    done: int = 0
    """Of `total`: completions of "evaluate" and "generate", optimizer steps of "forward_backward" and "critic"."""
    total: int = 0
    """0 for a part that is not counted."""
    tokens_per_second: float | None = None
    """Tokens of the finished completions per second of this part; of a supervised run, tokens of its
    last step's samples, learned or not, by the step's seconds."""
    step: int = 0
    """Number of the current step, from 0. Equal to `steps` in the final evaluation."""
    steps: int = 0
    activity_s: float = 0.0
    """Seconds of this part so far."""
    elapsed_s: float = 0.0
    """Seconds since the command began."""
    eta_s: float | None = None
    """Seconds until the run's last step ends, by the latest steps; None before the first has ended and after the last."""
    waits_for: str = ""
    """Why the part takes longer than usual, in words for a person; usually empty."""
    updated_at: float = 0.0
    """Unix time of the record, which is renewed every second. An old one is of a command that was killed or stopped."""


class Progress:
    """Progress of one run, told by its loop and read by any thread."""

    def __init__(self, *, num_steps: int = 0, eval_every: int | None = None) -> None:
        """eval_every: steps between evaluations; None without any."""
        self._num_steps, self._eval_every = num_steps, eval_every
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._step, self._step_started = 0, self._started
        self._recent: deque[Step] = deque(maxlen=_RECENT_STEPS)
        self._eval_s = 0.0
        self._trained_per_s: float | None = None
        self._begin("start", 0, 0)

    def begin(self, step: int, activity: str, *, done: int = 0, total: int = 0) -> None:
        """Begins a part of a step; ends the one before. done: of the total, before this part."""
        with self._lock:
            if step != self._step:
                self._step, self._step_started = step, time.monotonic()
            self._begin(activity, done, total)

    @contextmanager
    def timed(self, step: Step, activity: str, *, done: int = 0, total: int = 0) -> Iterator[None]:
        """Begins a part and adds its duration to the step."""
        self.begin(step.step, activity, done=done, total=total)
        with step.timed(activity):
            yield

    def counter(self) -> Callable[[int, int], None]:
        """Counts the completions of one call: the `on_progress` of generate."""
        before, tokens_before, has_begun = self._done, self._num_tokens, False

        def count(num_samples: int, num_tokens: int) -> None:
            nonlocal has_begun
            with self._lock:
                self._done, self._num_tokens = before + num_samples, tokens_before + num_tokens
                if not num_samples:
                    self._waits_for = RESTARTED if has_begun else ""
                    has_begun = True

        return count

    def waits(self, text: str) -> None:
        """Says why the current part takes longer than usual."""
        with self._lock:
            self._waits_for = text

    def finished(self, step: Step) -> None:
        """Takes a finished step into the estimate of those to come, also one of the run's earlier lives."""
        with self._lock:
            self._eval_s = step.seconds.get("evaluate", self._eval_s)
            spent_s = step.total_seconds() - step.seconds.get("evaluate", 0.0)
            if "num_read_tokens" in step.metrics and spent_s:
                self._trained_per_s = step.metrics["num_read_tokens"] / spent_s
            if not step.is_evaluation:
                self._recent.append(step)

    def record(self) -> ProgressRecord:
        with self._lock:
            now = time.monotonic()
            activity_s = now - self._activity_started
            trained_per_s = self._trained_per_s if self._activity == "forward_backward" else None
            return ProgressRecord(
                activity=self._activity,
                done=self._done,
                total=self._total,
                tokens_per_second=self._num_tokens / activity_s if self._num_tokens else trained_per_s,
                step=self._step,
                steps=self._num_steps,
                activity_s=activity_s,
                elapsed_s=now - self._started,
                eta_s=self._eta_s(now - self._step_started),
                waits_for=self._waits_for,
                updated_at=time.time(),
            )

    def _begin(self, activity: str, done: int, total: int) -> None:
        self._activity, self._activity_started = activity, time.monotonic()
        self._done, self._total, self._num_tokens, self._waits_for = done, total, 0, ""

    def _eta_s(self, step_s: float) -> float | None:
        """step_s: seconds of the current step so far."""
        if not self._recent or self._activity in ("export", "stop"):
            return None
        spent = sorted(step.total_seconds() - step.seconds.get("evaluate", 0.0) for step in self._recent)
        cut = (len(spent) + 1) // 4
        usual_s = fmean(spent[cut : len(spent) - cut])
        first, end, every = self._step, self._num_steps, self._eval_every
        # Multiples of `every` from the current step on, and the final evaluation.
        num_evals = 0 if every is None else max(0, (end - 1) // every - (first - 1) // every) + 1
        left_s = (end - first) * usual_s + num_evals * self._eval_s
        return max(0.0, left_s - min(step_s, usual_s + self._eval_s))
