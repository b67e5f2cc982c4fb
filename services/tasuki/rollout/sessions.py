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
