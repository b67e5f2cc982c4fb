"""A training run for `tasuki train`, whether [train] uses rewards or [sft] examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tasuki.client.dataset import Dataset
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.runs.continuation import Continuation
from tasuki.runs.settings import RunSettings

Loop = Callable[[Client, Dataset[Any], Continuation, Callable[[Step], None]], None]
"""Trains from the continuation on, on an existing dataset; passes each finished step to the last argument."""


class Training(Protocol):
    """A run with validated configuration and files."""

    @property
    def settings(self) -> RunSettings: ...

    @property
    def longest_sample(self) -> int:
        """Maximum tokens of a sample, prompt plus completion."""
        ...

    def dataset(self) -> Dataset[Any]:
        """The dataset, at its start."""
        ...

    def opened(self, folders: Sequence[Path], *, save_now: Callable[[], bool]) -> AbstractContextManager[Loop]:
        """Opens the loop, with its worker processes for the duration of the block.

        folders: searched for the user's modules. save_now: polled after each step: whether to save it although no checkpoint is due.
        """
        ...

    def summary(self, steps: Sequence[Step], *, seconds: float, changeovers: int, policy_version: int) -> dict[str, object]:
        """Summary of the run, for summary.json."""
        ...

    def draw(self, steps: Sequence[Step]) -> None:
        """Writes curve.png."""
        ...
