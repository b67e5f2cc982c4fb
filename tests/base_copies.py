"""Arena chunks that a process has mapped, read from /proc."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Chunks:
    """Inodes of mapped memfds: those mapped read-only, and those that the process can write to."""

    read: frozenset[int]
    written: frozenset[int]


def chunks_of(pid: int) -> Chunks:
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:tasuki " in line]
    read, written = ({int(line[4]) for line in lines if ("w" in line[1]) is can_write} for can_write in (False, True))
    return Chunks(frozenset(read), frozenset(written))


def shared_by(pid: int, other: int) -> frozenset[int]:
    """Returns the chunks that both have mapped and neither can write to."""
    one, two = chunks_of(pid), chunks_of(other)
    return (one.read & two.read) - one.written - two.written


def chunk_at(address: int) -> int:
    """Returns the inode of the chunk mapped at `address` in this process; 0 if no chunk is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            return int(inode) if name and name[0].startswith("/memfd:tasuki") else 0
    return 0
