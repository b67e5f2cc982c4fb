"""Code run in an episode's worker process: imports the user's function and runs many episodes at once."""

import asyncio
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from tasuki.client.policy import Policy
from tasuki.client.reward_worker import Source, become_worker, checked_reward, load_function, read_signature, send_answer, told

_LOOK_EVERY_S = 0.2
_MAX_BYTES = 1 << 23
BLOCKED = 77
"""Exit code of a worker whose event loop an episode has blocked, after it has told which."""


def serve(connection_fd: int) -> NoReturn:
    """Tells the signature of the function and the process's id, then runs episodes, until the client has ended."""
    connection = become_worker(connection_fd)
    (source,) = connection.recv()
    send_answer(connection, [[read_signature(*source, is_async=True)], os.getpid()])
    _Episodes(connection, source).run()


class _Episodes:
    """Messages to the client are `[episode, number, kind, fields]`: a question to the policy, that nobody waits for its answer,
    that the episode runs by itself, its end."""

    def __init__(self, connection: Connection, source: Source) -> None:
        self._connection, self._source, self._loop = connection, source, asyncio.new_event_loop()
        self._timeout_s = math.inf
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[tuple[int, int], asyncio.Future[dict[str, Any]]] = {}

    def run(self) -> NoReturn:
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task; the episode that awaits it fails by it
                self._loop.run_forever()

    def _watch(self) -> None:
        """Ends the process if an episode's code does not return to the event loop in time; all others would wait for it."""
        seen, since = None, 0.0
        while True:
            time.sleep(_LOOK_EVERY_S)
            task = asyncio.current_task(self._loop)
            if task is None or task is not seen:
                seen, since = task, time.monotonic()
            elif time.monotonic() - since > self._timeout_s + _LOOK_EVERY_S:
                episode = next((number for number, one in self._tasks.items() if one is task), None)
                if episode is not None:
                    why = f"blocked its worker for over {self._timeout_s:g} s; its code awaits what takes time, or runs it in a thread"
                    send_answer(self._connection, [episode, None, "end", (math.nan, why, {})])
                    os._exit(BLOCKED)

    def _read(self) -> None:
        """Reads in a thread: the client must never wait for an event loop that is busy."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # tools may still run in threads
            self._loop.call_soon_threadsafe(self._take, *message)

    def _take(self, episode: int, number: int | None, fields: dict[str, Any] | None) -> None:
        """Takes one message of the client: an episode to run, or to end, or an answer of the policy."""
        if fields is None:
            if (task := self._tasks.get(episode)) is not None:
                task.cancel()
        elif number is None:
            self._timeout_s = fields["timeout_s"]
            self._tasks[episode] = self._loop.create_task(self._episode(episode, **fields))
        elif (answer := self._answers.pop((episode, number), None)) is not None and not answer.done():
            answer.set_result(fields)

    async def _episode(self, episode: int, *, arguments: Mapping[str, Any], timeout_s: float) -> None:
        """Runs one episode and tells its reward. timeout_s: without the time that the policy takes."""
        clock, numbers_of_calls = _Clock(timeout_s), itertools.count()

        async def ask(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
            if asyncio.get_running_loop() is not self._loop:
                problem = "a turn is asked for in another event loop; await it in the function's, or use asyncio.run_coroutine_threadsafe"
                raise RuntimeError(problem)
            if episode not in self._tasks:
                raise asyncio.CancelledError("the episode has ended")  # in a task that it has left behind
            if (size := len(json.dumps(fields))) > _MAX_BYTES:
                raise ValueError(f"the prompt has {size} bytes as JSON; at most {_MAX_BYTES}")
            number = next(numbers_of_calls)
            answer = self._answers[episode, number] = self._loop.create_future()
            with clock.stopped():
                send_answer(self._connection, [episode, number, kind, fields])
                try:
                    answered = await answer
                except asyncio.CancelledError:
                    send_answer(self._connection, [episode, number, "left", None])
                    raise
                send_answer(self._connection, [episode, number, "runs", None])
            if "error" in answered:
                raise ValueError(answered["error"])
            return answered

        send_answer(self._connection, [episode, None, "runs", None])
        try:
            async with clock.running():
                function = cast(Callable[..., Awaitable[object]], load_function(*self._source))
                policy = Policy(ask)
                answer = *checked_reward(await function(policy=policy, **arguments)), {}
                if policy.turn_rewards and not answer[1]:
                    policy.reward(answer[0])
                    answer = *checked_reward(math.fsum(policy.turn_rewards.values())), policy.turn_rewards
        except BaseException as error:  # noqa: BLE001  the user's function may raise anything
            why = f"took over {timeout_s:g} s of its own time" if clock.has_run_out() else f"raised {told(error)}"
            answer = math.nan, why, {}
        self._tasks.pop(episode)
        for key in [key for key in self._answers if key[0] == episode]:
            self._answers.pop(key).cancel()
        send_answer(self._connection, [episode, None, "end", answer])


class _Clock:
    """The time limit of an episode, which stands still while the policy generates."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_stops = 0
        self._has_run_out = False

    def running(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout(self._limit_s)
        return self._timeout

    def has_run_out(self) -> bool:
        return self._has_run_out or self._timeout.expired()

    def stopped(self) -> "_Clock":
        return self

    def __enter__(self) -> None:
        self._num_stops += 1
        if self._num_stops == 1 and (ends := self._timeout.when()) is not None:
            self._left_s = ends - asyncio.get_running_loop().time()
            self._has_run_out = self._left_s <= 0
            if self._has_run_out:
                raise TimeoutError
            self._timeout.reschedule(None)

    def __exit__(self, *error: object) -> None:
        self._num_stops -= 1
        if not self._num_stops:
            with suppress(RuntimeError):  # the episode has ended meanwhile
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)
