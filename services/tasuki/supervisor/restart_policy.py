"""Limits restarts, so that a node that cannot recover ends with a report instead of retrying forever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


class RestartPolicy:
    """Allows `max_restarts` of each service within `window_s`, with a pause that doubles each time."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max, self._window_s = max_restarts, window_s
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()

    def next_pause(self, service: str, *, now: float) -> float | None:
        """Counts a restart and returns the seconds to wait before it; None if the limit is reached."""
        times = self._times[service]
        while times and now - times[0] > self._window_s:
            times.popleft()
        if len(times) >= self._max:
            return None
        times.append(now)
        self.counts[service] += 1
        return min(_FIRST_PAUSE_S * 2 ** (len(times) - 1), _LONGEST_PAUSE_S)
