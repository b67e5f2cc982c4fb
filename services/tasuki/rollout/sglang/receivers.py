"""What stands between SGLang's scheduler and its receiver of requests."""

from collections import deque
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

from tasuki.rollout.rank import EngineLock


class LendingReceiver:
    """SGLang's receiver of requests; releases the lock while it waits for them or for the first rank to pass them on."""

    def __init__(self, receiver: Any, lock: EngineLock) -> None:
        self._receiver, self._lock = receiver, lock

    def recv_requests(self, **options: Any) -> list[Any]:
        with self._lock.released():
            return list(self._receiver.recv_requests(**options))


class FirstSamples:
    """The first sample of every prompt goes ahead of the others, which then find the prompt in the engine's cache.

    SGLang computes all prompts of one batch side by side, equal ones as well, and caches a prompt once its batch has ended. All ranks of
    an engine receive the same, and hold the same back.
    """

    def __init__(self, receiver: Any, *, num_iterations: int) -> None:
        """num_iterations: of the scheduler's loop, from a batch's start until its prompts are cached."""
        self._receiver = receiver
        self._num_iterations = num_iterations
        self._held: deque[tuple[int, Any]] = deque()
        """Requests, with the iteration that they begin in."""
        self._iteration = 0

    @property
    def is_holding(self) -> bool:
        """Whether requests wait for a later iteration."""
        return bool(self._held)

    def recv_requests(self, **options: Any) -> list[Any]:
        """Called once in every iteration; returns what is to begin now."""
        self._iteration += 1
        delivered = self._due(self._iteration)
        for message in self._receiver.recv_requests(**options):
            if not isinstance(message, BatchTokenizedGenerateReqInput):
                # It may abort requests that are held.
                delivered += [*self._due(self._iteration + self._num_iterations), message]
                continue
            first, others = _parts(message)
            delivered.append(first)
            if others.batch:
                self._held.append((self._iteration + self._num_iterations, others))
        return delivered

    def _due(self, iteration: int) -> list[Any]:
        due: list[Any] = []
        while self._held and self._held[0][0] <= iteration:
            due.append(self._held.popleft()[1])
        return due


def _parts(message: BatchTokenizedGenerateReqInput) -> tuple[BatchTokenizedGenerateReqInput, BatchTokenizedGenerateReqInput]:
    """The first sample of every prompt, and the others."""
    first: dict[str, Any] = {}
    others = [request for request in message.batch if first.setdefault(_prompt(request), request) is not request]
    return BatchTokenizedGenerateReqInput(batch=list(first.values())), BatchTokenizedGenerateReqInput(batch=others)


def _prompt(request: Any) -> str:
    """Prefix of the request's id that all samples of its prompt share (see Rollout.generate)."""
    return request.rid.rpartition("-")[0]
