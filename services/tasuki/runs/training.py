"""A training run for `tasuki train`, whether [train] uses rewards or [sft] examples, and the request to save and end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import PendingStep
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.runs.continuation import Continuation
from tasuki.runs.settings import RunSettings


class Loop(Protocol):
    """The loop of a run, such as RlLoop."""

    def run(self, report: Callable[[Step], None], *, first_step: int = 0, pending: PendingStep | None = None) -> None: ...
    def evaluate(self, step: Step) -> None: ...


MakeLoop = Callable[[Client, Dataset[Any], Continuation], Loop]
"""Makes the loop with the state of the continuation, on an existing dataset."""


class Training(Protocol):
    """A run with validated configuration and files."""

    @property
    def settings(self) -> RunSettings: ...

    @property
    def eval_every(self) -> int | None:
        """Steps between evaluations; None without any."""
        ...

    @property
    def longest_sample(self) -> int:
        """Maximum tokens of a sample, prompt plus completion."""
        ...

    @property
    def now(self) -> datetime:
        """What chat templates read as the time, in all lives of the run."""
        ...

    def dataset(self) -> Dataset[Any]:
        """The dataset, at its start."""
        ...

    def opened(
        self, folders: Sequence[Path], *, save_now: Callable[[], bool], progress: Progress
    ) -> AbstractContextManager[MakeLoop]:
        """Opens what the loop needs, such as worker processes, for the duration of the block.

        folders: searched for the user's modules. save_now: polled after each step: whether to save it although no checkpoint is due.
        progress: told by the loop.
        """
        ...

    def summary(self, steps: Sequence[Step], *, seconds: float, changeovers: int, policy_version: int) -> dict[str, object]:
        """Summary of the run, for summary.json."""
        ...

    def draw(self, steps: Sequence[Step]) -> None:
        """Writes curve.png."""
        ...


class SaveRequest:
    """Set by SIGUSR1, which a scheduler sends before it takes the machine away.

    The current step is finished and saved, and the run ends. `tasuki train --resume` continues it.
    """

    def __init__(self) -> None:
        self._is_made = False
        self.is_met = False
        """Whether a loop has since seen the request and saved."""

    def install(self) -> None:
        """Installs the signal handler; call it from the main thread."""
        signal.signal(signal.SIGUSR1, self._make)

    def save_now(self) -> bool:
        """Whether to save the step that was just trained."""
        self.is_met = self._is_made
        return self.is_met

    def end_if_met(self) -> None:
        """Raises KeyboardInterrupt, which ends the command like Ctrl-C."""
        if self.is_met:
            raise KeyboardInterrupt

    def _make(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True
