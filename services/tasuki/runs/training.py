"""A training run for `tasuki train`, whether [train] uses rewards or [sft] examples, and the request to save and end it."""

import signal
from types import FrameType

from tasuki.runs.rl_training import RlTraining
from tasuki.runs.sft_training import SftTraining

Training = RlTraining | SftTraining
"""A run with validated configuration and files."""


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
