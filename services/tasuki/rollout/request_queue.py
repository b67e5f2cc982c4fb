"""Submits calls to the engine in parts and in turns, so that none blocks the event loop, the engine's queue or another call."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from tasuki.rollout.generate import EngineRequest

AT_ONCE = 1024
"""Requests submitted in one turn of the event loop, 20 ms of SGLang's front. The engine starts on a part as it arrives: only within one
part are samples batched, and therefore computed, alike at any speed of this process."""
_MAX_ENDED = 2048
"""Completions that a call collects in one turn of the event loop."""
Answer = Mapping[str, Any]
"""SGLang's answer to a request that has ended."""


class Call:
    """The requests of one call: those waiting here, those in the engine, and those that have ended."""

    def __init__(self, requests: Iterator[EngineRequest], *, num_requests: int, prefix: str, session_key: str = "") -> None:
        """prefix: common to the ids of all its requests and of no other call's."""
        self.prefix, self.session_key = prefix, session_key
        self.num_waiting = num_requests
        """Number of requests not yet submitted."""
        self.num_in_engine = 0
        self._requests = requests
        self._num_left, self._num_taken = num_requests, 0
        self._ended: deque[tuple[int, Answer | None]] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def take(self) -> tuple[int, list[EngineRequest]]:
        """Takes the next part and returns the index of its first request. It counts as submitted from then on."""
        first, part = self._num_taken, list(islice(self._requests, min(AT_ONCE, self.num_waiting)))
        self._num_taken += len(part)
        self.num_waiting -= len(part)
        self.num_in_engine += len(part)
        return first, part

    def end(self, index: int, answer: Answer) -> None:
        """Records a request that the engine has ended."""
        self.num_in_engine -= 1
        self._ended.append((index, answer))
        self._news.set()

    def cut(self) -> int:
        """Cancels the waiting requests. Returns their number."""
        num_cut, self.num_waiting = self.num_waiting, 0
        self._ended.extend((index, None) for index in range(self._num_taken, self._num_taken + num_cut))
        self._news.set()
        return num_cut

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def ended(self) -> Sequence[tuple[int, Answer | None]]:
        """Waits for ended requests; returns index and answer, None for one never submitted. Empty once all are reported.

        Raises any error of submission.
        """
        while self._num_left and not self._ended:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        ended = [self._ended.popleft() for _ in range(min(_MAX_ENDED, len(self._ended)))]
        self._num_left -= len(ended)
        return ended


class Intake:
    """Submits calls. A call's first part goes immediately; further parts take turns as there is room."""

    def __init__(self, submit: Callable[[Call], None], *, room: Callable[[], int]) -> None:
        """submit: gives the engine the next part of a call. room: number of requests that the engine takes without a long queue."""
        self._submit, self._room = submit, room
        self._new: deque[Call] = deque()
        self._begun: deque[Call] = deque()
        self._work = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._hand_over())

    @property
    def num_waiting(self) -> int:
        """Requests not yet submitted."""
        return sum(call.num_waiting for call in (*self._new, *self._begun))

    def enter(self, call: Call) -> None:
        self._new.append(call)
        self._work.set()

    def leave(self, call: Call) -> None:
        """Cancels the call's requests that are not yet submitted."""
        for calls in (self._new, self._begun):
            if call in calls:
                calls.remove(call)

    def cut(self) -> int:
        """Cancels all waiting requests. Returns their number."""
        calls = (*self._new, *self._begun)
        self._new.clear()
        self._begun.clear()
        return sum(call.cut() for call in calls)

    def notice_room(self) -> None:
        """Continues submission; called when the engine may have room."""
        if self._begun:
            self._work.set()

    def close(self) -> None:
        """Stops submission."""
        self._task.cancel()

    async def _hand_over(self) -> None:
        while True:
            call = self._next()
            if call is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                self._submit(call)
            except Exception as error:  # noqa: BLE001 - the call hears of it, and others have their turns
                call.fail(error)
            else:
                if call.num_waiting:
                    self._begun.append(call)
            await asyncio.sleep(0)

    def _next(self) -> Call | None:
        """The call whose turn it is, if there is room."""
        if self._new:
            return self._new.popleft()
        if self._begun and self._room() >= min(AT_ONCE, self._begun[0].num_waiting):
            return self._begun.popleft()
        return None
