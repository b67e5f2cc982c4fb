"""Networks for the nodes of a fleet on one machine: namespaces joined by veth pairs, or one namespace for all."""

import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Network of one node. prefix: of every command that runs there."""

    host: str
    interface: str
    prefix: tuple[str, ...] = ()

    def received_bytes(self) -> int:
        """Bytes received over the interface."""
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(subprocess.check_output([*self.prefix, "cat", path], text=True))


LOOPBACK = Place("127.0.0.1", "lo")


def can_make_namespaces() -> bool:
    """Whether this process may create namespaces: it needs root, and a kernel with veth pairs and bridges."""
    if os.geteuid() != 0:
        return False
    name = f"tasuki-try-{os.getpid()}"
    links = ("bridge0", "type", "bridge"), ("port0", "type", "veth", "peer", "name", "port1")
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    tries = [subprocess.run(["ip", "-n", name, "link", "add", *link], check=False, capture_output=True) for link in links]
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return all(one.returncode == 0 for one in tries)


@contextmanager
def namespaces(number: int) -> Iterator[list[Place]]:
    """Creates namespaces that reach only each other, over 10.77.0.0/24: veth pairs to a bridge in a separate namespace."""
    names = [f"tasuki-{os.getpid()}-{rank}" for rank in range(number)]
    links = [f"tk{os.getpid() % 10**6}-{rank}" for rank in range(number)]
    switch = f"tasuki-{os.getpid()}-switch"
    made: list[str] = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for rank, (name, link) in enumerate(zip(names, links, strict=True)):
            port = f"port{rank}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", link, "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [
            Place(f"10.77.0.{rank + 1}", link, ("ip", "netns", "exec", name))
            for rank, (name, link) in enumerate(zip(names, links, strict=True))
        ]
    finally:
        for name in made:
            _ip("netns", "delete", name)


@contextmanager
def places_of(number: int) -> Iterator[Sequence[Place]]:
    """Networks of `number` nodes: a namespace each if this process may create them."""
    if can_make_namespaces():
        with namespaces(number) as places:
            yield places
    else:
        warnings.warn("no namespaces without root: all nodes share one network", stacklevel=2)
        yield [LOOPBACK] * number


@contextmanager
def namespace_pair() -> Iterator[tuple[Place, Place]]:
    """Two networks joined by a veth pair: the test's namespace and another. Needs root."""
    name, here, there = f"tasuki{os.getpid()}", f"tv{os.getpid() % 100000}a", f"tv{os.getpid() % 100000}b"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("addr", "add", "10.117.0.1/24", "dev", here)
        _ip("link", "set", here, "up")
        for arguments in (
            ["addr", "add", "10.117.0.2/24", "dev", there],
            ["link", "set", there, "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip("-n", name, *arguments)
        yield Place("10.117.0.1", here), Place("10.117.0.2", there, ("ip", "netns", "exec", name))
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
