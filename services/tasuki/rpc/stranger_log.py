"""Log lines about unknown callers, limited so that they cannot fill a disk."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger("tasuki.rpc")
_EVERY_S = 1.0


class StrangerLog:
    """Writes at most one line a second, with the number of refusals since the last."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._told = float("-inf")

    def refused(self, method: str, *, peer: str) -> None:
        """Counts, and perhaps logs, a refused call of `method` by an unknown caller at `peer`."""
        self._num_refused += 1
        now = time.monotonic()
        if now - self._told < _EVERY_S:
            return
        _log.warning("event=strangers_refused num=%d last_rpc=%s last_peer=%s", self._num_refused, method, peer)
        self._num_refused, self._told = 0, now
