"""Where a session's requests go: to the replica, or the node of a fleet, that has its prefix in the KV cache."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

_MAX_SESSIONS = 65_536


class SessionPlaces:
    """The place of each session. Of too many, those that were used least recently are forgotten."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, int] = OrderedDict()
        self._num_sessions: Counter[int] = Counter()

    def place(self, session_key: str, loads: Sequence[int]) -> int:
        """The session's place; a new one's is that with the least load, then with the fewest sessions.

        loads: requests running at each place.
        """
        place = self._places.pop(session_key, None)
        if place is None:
            place = min(range(len(loads)), key=lambda one: (loads[one], self._num_sessions[one]))
            self._num_sessions[place] += 1
        self._places[session_key] = place
        if len(self._places) > _MAX_SESSIONS:
            self._num_sessions[self._places.popitem(last=False)[1]] -= 1
        return place


def shares(num_running: Sequence[int], num_requests: int) -> list[range]:
    """Splits requests over places so that all end up with equally many; those that already have more get none.

    num_running: at each place. Shares are contiguous, so that samples of one prompt stay together and share its KV cache.
    """
    idlest = sorted(range(len(num_running)), key=lambda place: num_running[place])
    while len(idlest) * num_running[idlest[-1]] > num_requests + sum(num_running[place] for place in idlest):
        idlest.pop()
    level, over = divmod(num_requests + sum(num_running[place] for place in idlest), len(idlest))
    counts = [0] * len(num_running)
    for index, place in enumerate(idlest):
        counts[place] = level + (index < over) - num_running[place]
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
