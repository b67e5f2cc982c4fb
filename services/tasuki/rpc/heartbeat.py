"""Pulse of a process, in a file that the supervisor reads: whether it lives, and whether its work progresses.

24 bytes, shared by mmap: number of beats, progress of the work (odd while it runs, so that a supervisor knows when to expect
progress), and the same for background transfers.
"""

import asyncio
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from tasuki.config.checks import HEARTBEAT_S
from tasuki.config.paths import pulse_dir

_COUNTERS = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Pulse:
    """One reading."""

    beats: int
    progress: int
    transferred: int

    @property
    def is_working(self) -> bool:
        return self.progress % 2 == 1

    @property
    def is_transferring(self) -> bool:
        return self.transferred % 2 == 1


def read_pulse(path: Path) -> Pulse | None:
    """None while the file is not whole, or gone."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return Pulse(*_COUNTERS.unpack(content)) if len(content) == _COUNTERS.size else None


class Heartbeat:
    """Pulse of this process, until `close`. It begins to beat with `beat_in_thread` or `beat_in_loop`.

    Until then the process is starting; the supervisor counts it as hung only if it was stopped (SIGSTOP).
    """

    def __init__(self, state_dir: Path, process: str) -> None:
        """process: e.g. "coordinator", "trainer1" for a rank, "scheduler0"; the part before the digits names one kind of process."""
        self._path = pulse_dir(state_dir) / f"{process}-{os.getpid()}"
        self._shared, self._counters = self._open(), Pulse(0, 0, 0)
        self._transfer: Callable[[], int] | None = None
        self._transfer_progress = 0
        self._write = threading.Lock()
        self._end = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def beat_in_thread(self) -> None:
        """Beats from a thread: shows that the process is scheduled, whatever its main thread does."""
        self._thread = threading.Thread(target=self._beat_until_end, name="heartbeat", daemon=True)
        self._thread.start()

    def beat_in_loop(self) -> None:
        """Beats from the event loop: shows that it runs."""
        self._task = asyncio.get_running_loop().create_task(self._beat_for_ever())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks work that must progress. Not nested."""
        self._count(progress=1)
        try:
            yield
        finally:
            self._count(progress=1)

    def progressed(self) -> None:
        """Records progress of the running work."""
        self._count(progress=2)

    @contextmanager
    def transferring(self, progress: Callable[[], int]) -> Iterator[None]:
        """Marks a background transfer beside the running work. progress: a growing count, read at each beat. Not nested."""
        self._transfer_progress, self._transfer = progress(), progress
        self._count(transferred=1)
        try:
            yield
        finally:
            self._transfer = None
            self._count(transferred=1)

    def close(self) -> None:
        """Ends the pulse; none is expected afterwards."""
        self._end.set()
        if self._task is not None:
            self._task.cancel()
        if self._thread is not None:
            self._thread.join()
        self._path.unlink(missing_ok=True)

    def _beat_until_end(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._beat()

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(HEARTBEAT_S)

    def _beat(self) -> None:
        transfer, known = self._transfer, self._transfer_progress
        self._transfer_progress = known if transfer is None else transfer()
        self._count(beats=1, transferred=2 if self._transfer is not None and self._transfer_progress != known else 0)

    def _count(self, *, beats: int = 0, progress: int = 0, transferred: int = 0) -> None:
        with self._write:
            known = self._counters
            self._counters = Pulse(known.beats + beats, known.progress + progress, known.transferred + transferred)
            self._shared = self._shared or self._open()
            if self._shared is not None:
                _COUNTERS.pack_into(self._shared, 0, *astuple(self._counters))

    def _open(self) -> mmap.mmap | None:
        """Opens the pulse file; None if there is no room for it, since a full disk must not end the process."""
        try:
            self._path.write_bytes(_COUNTERS.pack(0, 0, 0))
            with self._path.open("r+b") as file:
                return mmap.mmap(file.fileno(), _COUNTERS.size)
        except OSError:
            self._path.unlink(missing_ok=True)
            return None
