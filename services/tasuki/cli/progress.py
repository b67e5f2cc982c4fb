"""A run's progress as text: one line rewritten in place on a terminal, elsewhere a plain line now and then."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.client.progress import RESTARTED, Progress, ProgressRecord
from tasuki.config.paths import log_path
from tasuki.dashboard.logs import RestartLogs
from tasuki.node.services import listens
from tasuki.runs.progress import progress_line, written_progress
from tasuki.wire.address import unix_target
from tasuki.wire.printable import printable

_PLAIN_EVERY_S = 10.0
_CLEAR = "\r\x1b[K"


class ProgressDisplay:
    """Shows records on standard error, between the lines that a run prints."""

    def __init__(self, progress: Progress, state_dir: Path) -> None:
        """state_dir: of the node, whose restarts are named."""
        self._progress = progress
        self._state_dir, self._down = state_dir, dict[str, str]()
        """Services that do not serve again yet -> why they restart."""
        self._restarts, self._since = RestartLogs(log_path(state_dir, "supervisor")), time.time()
        self._lock = threading.Lock()
        self._is_terminal, self._is_drawn = sys.stderr.isatty(), False
        self._last_line = time.monotonic()

    @contextmanager
    def shown(self, output_dir: Path) -> Iterator[None]:
        """Shows and writes the progress during the block."""
        with written_progress(self._progress, output_dir, show=self._show):
            yield
        self._clear()

    def write(self, text: str, *, is_warning: bool = False) -> None:
        """Prints lines of the run: to standard output, or warnings to standard error."""
        with self._lock:
            self._clear()
            stream = sys.stderr if is_warning else sys.stdout
            stream.write(f"{printable(text)}\n")
            stream.flush()
            self._last_line = time.monotonic()

    def _show(self, record: ProgressRecord) -> None:
        self._name_restarts(record)
        if record.activity in ("start", "stop"):  # told by the node's start and end
            self._clear()
            self._last_line = time.monotonic()
            return
        with self._lock:
            line = progress_line(record)
            if self._is_terminal:
                sys.stderr.write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])
                self._is_drawn = True
            elif time.monotonic() - self._last_line >= max(_PLAIN_EVERY_S, record.activity_s / 10):
                sys.stderr.write(f"{line}\n")
                self._last_line = time.monotonic()
            sys.stderr.flush()

    def _name_restarts(self, record: ProgressRecord) -> None:
        down = {name: why for name, why in self._down.items() if not listens(unix_target(self._state_dir, service=name))}
        found = self._restarts.read()["restarts"] if self._restarts.advance() else []
        new = [restart for restart in found if restart["time"] > self._since]
        for restart in reversed(new):
            self._since = restart["time"]
            down[restart["service"]] = text = f"{restart['service']} restarts: {restart['cause'] or 'it ended'}"
            self.write(f"{text}; the run goes on once it serves", is_warning=True)
        if down != self._down and (down or record.waits_for != RESTARTED):
            self._progress.waits(", ".join(down.values()))
        self._down = down

    def _clear(self) -> None:
        if self._is_drawn:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._is_drawn = False
