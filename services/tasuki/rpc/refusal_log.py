"""Log lines about refused calls, limited so that no caller can fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tasuki.wire.errors import TasukiError

_log = logging.getLogger("tasuki.rpc")
_AT_ONCE = 100.0
_PER_S = 5.0


class RefusalLog:
    """Writes a hundred lines at once and five a second from then on, with the number of those left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._counted_at = now, now()
        self._room = _AT_ONCE
        self._num_left_out = 0

    def refused(self, method: str, error: TasukiError, *, request_id: str) -> None:
        now = self._now()
        self._room = min(_AT_ONCE, self._room + (now - self._counted_at) * _PER_S)
        self._counted_at = now
        if self._room < 1:
            self._num_left_out += 1
            return
        self._room -= 1
        if self._num_left_out:
            _log.warning("event=refusals_left_out num=%d", self._num_left_out)
            self._num_left_out = 0
        _log.info("rpc=%s request_id=%s reason=%s message=%.1000s", method, request_id, error.reason, error.message)
