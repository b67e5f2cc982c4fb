"""An event loop whose clock jumps to the next timer when nothing else is left to do, so that hours pass in milliseconds."""

import asyncio
import selectors
from typing import Any


class _Clock(selectors.SelectSelector):
    """Waits by advancing the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits, and no timer is set: nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a virtual clock."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now
