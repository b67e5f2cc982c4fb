"""Limits restarts, so that a node that cannot recover ends with a report instead of retrying forever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
# A pause doubles with each restart within the last of these seconds.
_PAUSE_WINDOW_S = 60.0
_WINDOW_S = 600.0


class RestartPolicy:
    """Allows `max_restarts` of each service within ten minutes, with a pause that doubles each time."""

    def __init__(self, *, max_restarts: int) -> None:
        self._max = max_restarts
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()

    def next_pause(self, service: str, *, now: float) -> float | None:
        """Counts a restart and returns the seconds to wait before it; None if the limit is reached."""
        times = self._times[service]
        while times and now - times[0] > _WINDOW_S:
            times.popleft()
        if len(times) >= self._max:
            return None
        times.append(now)
        self.counts[service] += 1
        recent = sum(now - time <= _PAUSE_WINDOW_S for time in times)
        return min(_FIRST_PAUSE_S * 2 ** (recent - 1), _LONGEST_PAUSE_S)
