"""Resources that a killed process cannot remove itself."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tasuki.config.paths import socket_dir
from tasuki.node.model_copy import remove_model_copy
from tasuki.node.processes import descendants, shared_memory, shared_memory_of

_SCAN_EVERY_S = 10.0


class ResourceTracker:
    """The run folder with its sockets, the copy of the model, and files in /dev/shm used by the processes below this one."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._others = shared_memory()
        self._seen = self._others
        self._ours: set[Path] = set()
        self._next_scan = 0.0

    def poll(self) -> None:
        """Scans if /dev/shm has something new, and periodically; cheap otherwise."""
        present = shared_memory()
        if present - self._seen or time.monotonic() >= self._next_scan:
            self.scan()
            self._seen = present
            self._next_scan = time.monotonic() + _SCAN_EVERY_S

    def scan(self) -> None:
        """Records which shared memory the processes below this one use, since that is unknown once they have ended."""
        self._ours |= shared_memory_of(descendants(os.getpid())) - self._others

    def remove(self) -> None:
        """Removes the resources; call it once none of the processes is left."""
        for path in self._ours:
            path.unlink(missing_ok=True)
        remove_model_copy(self._state_dir)
        shutil.rmtree(socket_dir(self._state_dir), ignore_errors=True)
