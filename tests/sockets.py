"""Listening sockets of a process tree, read from the kernel, and who may connect to them."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
_LISTEN, _BOUND_UDP = "0A", "07"
_ACCEPTS = 0x10000
_STORE_CLIENT = """
import os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
def ask(port):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
    store.set("tasuki-test", "stranger")
    print(port, flush=True)
for port in map(int, sys.argv[1:]):
    threading.Thread(target=ask, args=(port,), daemon=True).start()
time.sleep(6)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that accepts connections or datagrams. address: "127.0.0.1:5000", a path, or "@name" for an abstract one."""

    pid: int
    kind: str
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def process_tree(pid: int) -> list[int]:
    """Returns the process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Returns all TCP, UDP and unix sockets on which the processes listen."""
    return [listener for pid in pids for listener in _listeners_of(pid)]


def _listeners_of(pid: int) -> Iterator[Listener]:
    inodes = set(_socket_inodes(pid))
    for kind, state in (("tcp", _LISTEN), ("tcp6", _LISTEN), ("udp", _BOUND_UDP), ("udp6", _BOUND_UDP)):
        for row in _rows(pid, kind):
            if row[3] == state and row[9] in inodes:
                yield Listener(pid, kind, _address(row[1]))
    for row in _rows(pid, "unix"):
        # Columns: number, references, protocol, flags, type, state, inode, and the path of a bound socket. Type 2: datagrams.
        if row[6] in inodes and len(row) > 7 and (int(row[3], 16) & _ACCEPTS or row[4] == "0002"):
            yield Listener(pid, "unix", row[7])


def _rows(pid: int, table: str) -> list[list[str]]:
    path = Path(f"/proc/{pid}/net/{table}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _socket_inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(field: str) -> str:
    """Decodes the kernel's address, whose words have the host's byte order, to text."""
    host, port = field.split(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"


def is_private(path: Path) -> bool:
    """Whether some parent folder is accessible to this user only."""
    status = [folder.stat() for folder in path.parents]
    return any(one.st_uid == os.geteuid() and stat.S_IMODE(one.st_mode) & 0o077 == 0 for one in status)


def who_can_connect(paths: Iterable[Path], *, uid: int) -> list[Path]:
    """Returns the unix sockets that a process with this uid can connect to. Must run as root to change its uid."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        reached = b"failed"
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            reached = b"\0".join(str(path).encode() for path in paths if _connects(path))
        finally:
            os.write(write_fd, reached)
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        reached = answer.read()
    os.waitpid(pid, 0)
    return [Path(os.fsdecode(path)) for path in reached.split(b"\0") if path]


def _connects(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            if probe.connect_ex(str(path)) == 0:
                return True
    return False


def torch_stores(ports: Iterable[int]) -> list[int]:
    """Returns the local ports on which a torch store accepts keys from any client.

    One process asks all ports at once: if a port accepts but never answers, torch's client waits for minutes, whatever its timeout.
    """
    argv = [sys.executable, "-c", _STORE_CLIENT, *map(str, ports)]
    asked = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120, check=True)
    return sorted(map(int, asked.stdout.split()))
