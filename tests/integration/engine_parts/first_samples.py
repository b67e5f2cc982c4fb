"""Requests that the engine receives in each iteration of its loop."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput

from tasuki.rollout.sglang.first_samples import FirstSamples


def batch(*ids: str) -> Any:
    return BatchTokenizedGenerateReqInput(batch=[SimpleNamespace(rid=rid) for rid in ids])


class Receiver:
    """Arrivals by iteration."""

    def __init__(self, *arrivals: list[Any]) -> None:
        self._arrivals = deque(arrivals)

    def recv_requests(self) -> list[Any]:
        return self._arrivals.popleft() if self._arrivals else []


def told(messages: list[Any]) -> list[Any]:
    return [
        [each.rid for each in message.batch] if isinstance(message, BatchTokenizedGenerateReqInput) else message
        for message in messages
    ]


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_the_first_sample_of_each_prompt_goes_ahead(num_iterations: int) -> None:
    arrived = batch("a-0-0.", "a-0-1.", "a-1-0.", "a-1-1.", "a-0-2.")
    samples = FirstSamples(Receiver([arrived]), num_iterations=num_iterations)
    assert told(samples.recv_requests()) == [["a-0-0.", "a-1-0."]]
    for _ in range(num_iterations - 1):
        assert samples.is_holding
        assert samples.recv_requests() == []
    assert told(samples.recv_requests()) == [["a-0-1.", "a-1-1.", "a-0-2."]]
    assert not samples.is_holding
    assert samples.recv_requests() == []


def test_a_command_overtakes_no_request() -> None:
    abort = AbortReq(rid="a-")
    samples = FirstSamples(Receiver([batch("a-0-0.", "a-0-1."), abort, batch("b-0-0.", "b-0-1.")]), num_iterations=2)
    assert told(samples.recv_requests()) == [["a-0-0."], ["a-0-1."], abort, ["b-0-0."]]
    assert samples.is_holding
    assert samples.recv_requests() == []
    assert told(samples.recv_requests()) == [["b-0-1."]]
