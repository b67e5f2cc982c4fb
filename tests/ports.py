"""Free TCP ports."""

import random
import socket

# Below those that Linux gives to outgoing connections and to servers that leave the choice to it.
_RANGE = range(20_000, 32_000)
_chosen: set[int] = set()


def free_port(*, num: int = 1) -> int:
    """The first of `num` ports in a row that are free on all addresses, and others at each call of a process."""
    choices = random.SystemRandom()
    while True:
        first = choices.choice(_RANGE)
        ports = range(first, first + num)
        if _chosen.isdisjoint(ports):
            _chosen.update(ports)
            if all(map(_is_free, ports)):
                return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
