"""A file of a run's folder that is read on while it grows."""

import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path

from tasuki.wire.regular_file import unreadable

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, sqlite3.Error)
"""What reading a damaged or foreign file raises, besides OSError."""


def problem_of(path: Path, error: Exception) -> str:
    """A line that says why `path` cannot be read; empty if it is missing."""
    return unreadable(path, error) if isinstance(error, OSError) else f"{path} cannot be read: {type(error).__name__}: {error}"


class Followed(ABC):
    """Whatever prevents the file from being read becomes `problem`; the rest of the run is shown."""

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""

    def advance(self) -> bool:
        """Reads on. Returns whether there was anything new, if only a problem."""
        before, is_new = self.problem, False
        try:
            is_new, self.problem = self.read_on(), ""
        except (OSError, *MALFORMED) as error:
            self.problem = problem_of(self.path, error)
        return is_new or self.problem != before

    @abstractmethod
    def read_on(self) -> bool:
        """Returns whether there was anything new. Raises OSError or one of MALFORMED."""
