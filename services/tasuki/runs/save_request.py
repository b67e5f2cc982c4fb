"""A request to save and end, as a scheduler makes it before it takes the machine away."""

from __future__ import annotations

import signal
from types import FrameType


class SaveRequest:
    """Made by SIGUSR1: the step that runs is finished, then saved, and the run ends; `tasuki train --resume` goes on from there."""

    def __init__(self) -> None:
        self._is_made = False
        self.is_met = False
        """Whether a loop has asked since, and saved."""

    def install(self) -> None:
        """Listens from here on, in the main thread."""
        signal.signal(signal.SIGUSR1, self._make)

    def save_now(self) -> bool:
        """Whether the step that has just been learned is to be saved."""
        self.is_met = self._is_made
        return self.is_met

    def end_if_met(self) -> None:
        """Raises KeyboardInterrupt, which ends the command as Ctrl-C does."""
        if self.is_met:
            raise KeyboardInterrupt

    def _make(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True
