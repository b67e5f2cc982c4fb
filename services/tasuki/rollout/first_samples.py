"""The first sample of every prompt goes ahead of the others, which then find the prompt in the engine's cache.

SGLang computes all prompts of one batch side by side, equal ones as well, and caches a prompt once its batch has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput


class FirstSamples:
    """Wraps SGLang's receiver of requests. All ranks of an engine receive the same, and hold the same back."""

    def __init__(self, receiver: Any, *, num_iterations: int) -> None:
        """num_iterations: of the scheduler's loop, from a batch's start until its prompts are cached."""
        self._receiver = receiver
        self._num_iterations = num_iterations
        self._waiting: deque[Any] = deque()
        """Messages in order of arrival."""
        self._begun: dict[str, int] = {}
        """Iteration in which a prompt was first delivered, for the recent ones."""
        self._iteration = 0

    @property
    def is_holding(self) -> bool:
        """Whether messages wait for a later iteration."""
        return bool(self._waiting)

    def recv_requests(self) -> list[Any]:
        """Called once in every iteration; returns what is to begin now."""
        for message in self._receiver.recv_requests():
            self._waiting.extend(_parts(message))
        self._iteration += 1
        earliest = self._iteration - self._num_iterations
        self._begun = {prompt: begun for prompt, begun in self._begun.items() if begun > earliest}
        delivered: list[Any] = []
        while self._waiting and self._begun.keys().isdisjoint(prompts := _prompts(self._waiting[0])):
            delivered.append(self._waiting.popleft())
            self._begun |= dict.fromkeys(prompts, self._iteration)
        return delivered


def _parts(message: Any) -> Iterator[Any]:
    """Splits a batch into the first sample of every prompt and the others; any other message is one part."""
    if not isinstance(message, BatchTokenizedGenerateReqInput):
        yield message
        return
    first: dict[str, Any] = {}
    others = [request for request in message.batch if first.setdefault(_prompt(request), request) is not request]
    yield BatchTokenizedGenerateReqInput(batch=list(first.values()))
    if others:
        yield BatchTokenizedGenerateReqInput(batch=others)


def _prompts(message: Any) -> set[str]:
    return {_prompt(request) for request in message.batch} if isinstance(message, BatchTokenizedGenerateReqInput) else set()


def _prompt(request: Any) -> str:
    """Prefix of the request's id that all samples of its prompt share (see Rollout.generate)."""
    return request.rid.rpartition("-")[0]
