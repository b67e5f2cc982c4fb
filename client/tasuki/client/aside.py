"""A worker thread for blocking calls, so that Ctrl-C can interrupt the main thread while it waits.

KeyboardInterrupt may be raised between any two bytecodes of the main thread, even inside `threading.Condition`. Its lock then stays
locked, and the thread that completes the future blocks forever. `queue.SimpleQueue` is written in C: an interrupt never leaves its
lock held.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class Pending(Generic[_Answer]):
    """The result of a call on another thread; can be awaited once."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[Callable[[], _Answer]] = SimpleQueue()

    def end(self, result: Callable[[], _Answer]) -> None:
        """result: returns the answer, or raises the call's error."""
        self._ended.put(result)

    def wait(self) -> _Answer:
        return self._ended.get()()


class Aside:
    """A thread that runs calls one after another."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """Returns what `work` returns and raises what it raises. If the caller is interrupted, `work` keeps running."""
        pending = Pending[_Answer]()

        def carry_out() -> None:
            done = Future[_Answer]()
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller's to handle
                done.set_exception(error)
            pending.end(done.result)

        self._calls.put(carry_out)
        return pending.wait()

    def close(self) -> None:
        """Waits for the running call, then ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _carry_out(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
