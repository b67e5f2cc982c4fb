"""How often a service may be restarted: a bound, so that a node that cannot live ends with a report instead of trying for ever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


class RestartPolicy:
    """At most `max_restarts` of each service within `window_s`; each waits twice as long as the one before."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max, self._window_s = max_restarts, window_s
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()

    def next_pause(self, service: str, *, now: float) -> float | None:
        """Seconds to wait before the service is restarted, which counts as a restart; None when it must not be any more."""
        times = self._times[service]
        while times and now - times[0] > self._window_s:
            times.popleft()
        if len(times) >= self._max:
            return None
        times.append(now)
        self.counts[service] += 1
        return min(_FIRST_PAUSE_S * 2 ** (len(times) - 1), _LONGEST_PAUSE_S)
