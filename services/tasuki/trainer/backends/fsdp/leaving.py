"""State that leaves behind OFFLOAD's answer: copied to the host and released when somebody asks for the room."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasuki.memory import arena as native
from tasuki.memory.allocator import NativeAllocator, Transfer
from tasuki.memory.room_request import RoomRequest
from tasuki.memory.tags import MemoryTag, Movement, MovementKind
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.wire.errors import TasukiError

# How often to check for a room request.
_REQUEST_POLL_S = 0.02
# How often to check whether the process is ending.
PIN_STEP_BYTES = 256 * 2**20
_log = logging.getLogger("tasuki.trainer")


class Leaving:
    """Tags of one rank that have been paused, as far as anybody else can tell, and are as they were until the room is needed.

    heartbeat: shows the progress of the copies. reached: called with a failpoint's name, before the copies and once all have left.
    """

    def __init__(self, allocator: NativeAllocator, *, heartbeat: Heartbeat | None, reached: Callable[[str], None]) -> None:
        self._allocator, self._heartbeat, self._reached = allocator, heartbeat, reached
        self._thread: threading.Thread | None = None
        self._is_recalled = threading.Event()
        self._has_left = False
        self._tags: tuple[MemoryTag, ...] = ()
        self._left: dict[MemoryTag, Movement] = {}
        self.waiting: tuple[MemoryTag, ...] = ()
        """Tags whose copies have not begun."""

    def begin(self, tags: Sequence[MemoryTag], *, request: RoomRequest) -> tuple[Movement, ...]:
        """Lets `tags` leave, in this order, once `request` is made. Returns the movements that have begun."""
        self._tags = self.waiting = tuple(tags)
        self._left = {}
        request.cancel()
        begun = tuple(Movement(MovementKind.LEAVE, tag, self._allocator.arena(tag).usage().mapped_bytes) for tag in tags)
        self._thread = threading.Thread(target=self._leave, args=(request,), name="leaving", daemon=True)
        self._thread.start()
        return begun

    def end(self) -> tuple[Movement, ...]:
        """Waits until what leaves has left. Tags whose copies have not begun stay as they are, and moved no bytes."""
        thread, self._thread = self._thread, None
        if thread is None:
            return ()
        self._is_recalled.set()
        thread.join()
        self._is_recalled.clear()
        tags, self._tags, self.waiting = self._tags, (), ()
        return tuple(self._left.get(tag, Movement(MovementKind.LEAVE, tag, 0, 0.0, time.time())) for tag in tags)

    def _leave(self, request: RoomRequest) -> None:
        """Copies tags to the host and releases them, one after the other. One that fails stays, and the next resume skips it."""
        if not self._is_asked(request):
            return
        self._has_left = True
        with showing_progress(self._heartbeat, native.copied_bytes):
            self._reached("leave")
            started = time.monotonic()
            transfers: dict[MemoryTag, Transfer] = {}
            for tag in self.waiting:
                with _logged():
                    transfers[tag] = self._allocator.pause_async([tag])
            self.waiting = ()
            for tag, transfer in transfers.items():
                with _logged():
                    released = transfer.wait()
                    seconds = time.monotonic() - started
                    self._left[tag] = Movement(MovementKind.LEAVE, tag, released, seconds, time.time())
                    _log.info("event=left tag=%s seconds=%.3f released_bytes=%d", tag, seconds, released)
            self._reached("leave.done")

    def _is_asked(self, request: RoomRequest) -> bool:
        """Waits for a request. Returns False if recalled first.

        The first time needs no request: an engine's first batch takes memory while its cache may already fill all that was free.
        """
        while self._has_left and not request.is_made:
            if self._is_recalled.wait(_REQUEST_POLL_S):
                return False
        return True


@contextmanager
def showing_progress(heartbeat: Heartbeat | None, progress: Callable[[], int]) -> Iterator[None]:
    """Reports progress of background work in the process's heartbeat, if it has one, for the supervisor."""
    if heartbeat is None:
        yield
        return
    with heartbeat.transferring(progress):
        yield


@contextmanager
def _logged() -> Iterator[None]:
    """Logs an error of one tag, which then stays."""
    try:
        yield
    except TasukiError as error:
        _log.error("event=leaving_failed reason=%s error=%s", error.reason, error.message)
