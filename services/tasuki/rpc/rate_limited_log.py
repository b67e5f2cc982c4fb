"""Log lines that callers cause, limited so that they cannot fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("tasuki.rpc")
_AT_ONCE = 100.0
_PER_S = 5.0


class RateLimitedLog:
    """Writes a hundred lines at once and five a second from then on, with the number of those left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._counted_at = now, now()
        self._room = _AT_ONCE
        self._num_left_out = 0

    def info(self, text: str, *args: object) -> None:
        now = self._now()
        self._room = min(_AT_ONCE, self._room + (now - self._counted_at) * _PER_S)
        self._counted_at = now
        if self._room < 1:
            self._num_left_out += 1
            return
        self._room -= 1
        if self._num_left_out:
            _log.warning("event=lines_left_out num=%d", self._num_left_out)
            self._num_left_out = 0
        _log.info(text, *args)
