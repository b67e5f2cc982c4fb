"""A training run as `tasuki train` sees it, whether [train] learns from rewards or [sft] from examples."""

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
"""Trains from where the continuation says, on a dataset that is there already; gives each step to the last argument as it ends."""


class Training(Protocol):
    """A run whose configuration and files were checked."""

    @property
    def settings(self) -> RunSettings: ...

    @property
    def longest_sample(self) -> int:
        """Most tokens that a sample of the run may have, prompt and completion together."""
        ...

    def dataset(self) -> Dataset[Any]:
        """At its beginning."""
        ...

    def opened(self, folders: Sequence[Path], *, save_now: Callable[[], bool]) -> AbstractContextManager[Loop]:
        """The loop, with its worker processes for as long as the block lasts.

        folders: where the user's modules are looked for. save_now: asked after each step, whether it is to be saved although not due.
        """
        ...

    def summary(self, steps: Sequence[Step], *, seconds: float, changeovers: int, policy_version: int) -> dict[str, object]:
        """The whole run in a few figures, for summary.json."""
        ...

    def draw(self, steps: Sequence[Step]) -> None:
        """Writes curve.png."""
        ...
