"""State that leaves after OFFLOAD's answer, when its room is requested, and returns before LOAD_TRAINER where room is offered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasuki.memory import arena as native
from tasuki.memory.allocator import NativeAllocator, Transfer
from tasuki.memory.pool import device_room
from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.tags import MemoryTag, Movement, MovementKind
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.trainer.backends.fsdp.returning import Returning
from tasuki.wire.errors import TasukiError

# How often to check the signal.
_SIGNAL_POLL_S = 0.02
# Pinned in one step; between steps the process checks whether it is ending.
PIN_STEP_BYTES = 256 * 2**20
# Left free on a GPU by an early return, for what torch may still allocate in the engine.
_SPARE_BYTES = 2 << 30
_log = logging.getLogger("tasuki.trainer")


class Leaving:
    """Tags of one rank that count as paused, whose pages go and come by a signal until LOAD_TRAINER.

    Nothing writes to them meanwhile, so what has returned leaves again without a copy.
    heartbeat: shows the progress of the copies. reached: called with a failpoint's name, before and after tags leave, and before one
    returns.
    """

    def __init__(
        self,
        allocator: NativeAllocator,
        returning: Returning,
        *,
        heartbeat: Heartbeat | None,
        reached: Callable[[str], None],
    ) -> None:
        """returning: takes over tags that return early."""
        self._allocator, self._returning = allocator, returning
        self._heartbeat, self._reached = heartbeat, reached
        self._spare_bytes = 0 if allocator.device == "cpu" else _SPARE_BYTES
        self._thread: threading.Thread | None = None
        self._is_recalled = threading.Event()
        self._has_left = False
        self._tags: tuple[MemoryTag, ...] = ()
        self._left: dict[MemoryTag, Movement] = {}
        self.waiting: tuple[MemoryTag, ...] = ()
        """Tags that have their pages, and may still leave."""

    def begin(self, tags: Sequence[MemoryTag], *, signal: RoomSignal) -> tuple[Movement, ...]:
        """Lets `tags` leave, in this order, once room is requested. Returns the movements that continue."""
        self._tags = self.waiting = tuple(tags)
        self._left = {}
        signal.clear()
        begun = tuple(Movement(MovementKind.LEAVE, tag, self._allocator.arena(tag).usage().mapped_bytes) for tag in tags)
        self._thread = threading.Thread(target=self._follow, args=(signal,), name="leaving", daemon=True)
        self._thread.start()
        return begun

    def end(self) -> tuple[Movement, ...]:
        """Waits until what leaves has left. Tags that have not left stay as they are, and moved no bytes."""
        thread, self._thread = self._thread, None
        if thread is None:
            return ()
        self._is_recalled.set()
        thread.join()
        self._is_recalled.clear()
        tags, self._tags, self.waiting = self._tags, (), ()
        return tuple(self._left.get(tag, Movement(MovementKind.LEAVE, tag, 0, 0.0, time.time())) for tag in tags)

    def _follow(self, signal: RoomSignal) -> None:
        """Leaves and returns as `signal` says, until recalled.

        The first time a process leaves without a request: an engine's first batch takes memory while its cache may already fill all
        that was free.
        """
        if not self._has_left:
            self._leave()
        while not self._is_recalled.wait(_SIGNAL_POLL_S):
            if signal.is_requested and self.waiting:
                self._leave()
            elif signal.is_offered:
                self._return_one()
            self._returning.pending()  # notes when content has arrived

    def _leave(self) -> None:
        """Copies tags to the host and releases them, one after the other. One that fails keeps its pages until LOAD_TRAINER."""
        self._has_left = True
        with showing_progress(self._heartbeat, native.copied_bytes):
            self._reached("leave")
            started = time.monotonic()
            transfers: dict[MemoryTag, Transfer] = {}
            for tag in self.waiting:
                with _logged():
                    is_unchanged = self._returning.cancel(tag)
                    transfers[tag] = self._allocator.pause_async([tag], is_unchanged=is_unchanged)
            self.waiting = ()
            for tag, transfer in transfers.items():
                with _logged():
                    released = transfer.wait()
                    seconds = time.monotonic() - started
                    self._left[tag] = Movement(MovementKind.LEAVE, tag, released, seconds, time.time())
                    _log.info("event=left tag=%s seconds=%.3f released_bytes=%d", tag, seconds, released)
            self._reached("leave.done")

    def _return_one(self) -> None:
        """Maps the tag that training needs first of those that have left, if there is room, and starts its copy."""
        away = [tag for tag in reversed(self._tags) if tag in self._left and tag not in self.waiting]
        if not away:
            return
        needed_bytes = self._allocator.arena(away[0]).usage().total_bytes
        free_bytes, _ = device_room(self._allocator.device)
        if free_bytes < needed_bytes + self._spare_bytes:
            return
        with showing_progress(self._heartbeat, native.copied_bytes), _logged():
            self._reached("return")
            self._returning.begin([away[0]], is_early=True)
            self.waiting = (away[0], *self.waiting)
            _log.info("event=returned_early tag=%s bytes=%d", away[0], needed_bytes)


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
    """Logs an error of one tag, which then stays as it is."""
    try:
        yield
    except TasukiError as error:
        _log.error("event=moving_failed reason=%s error=%s", error.reason, error.message)
