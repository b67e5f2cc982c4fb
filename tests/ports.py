"""Free TCP ports."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to outgoing connections and to servers that leave the choice to it.
_RANGE = range(20_000, 32_000)
_chosen: set[int] = set()


def free_port() -> int:
    """A port free on all addresses, and another one at each call of a process."""
    choices = random.SystemRandom()
    while True:
        port = choices.choice(_RANGE)
        if port in _chosen:
            continue
        _chosen.add(port)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
