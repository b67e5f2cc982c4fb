"""A trainer that starts beside rollout: whom it waits for, and until when."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tasuki.rpc.memory import wait_to_leave
from tasuki.v1 import rollout_pb2, rollout_pb2_grpc, types_pb2
from tasuki.wire.stages import MemoryTag, Service

KV_CACHE, WEIGHTS = types_pb2.MEMORY_TAG_KV_CACHE, types_pb2.MEMORY_TAG_WEIGHTS


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, *resident: types_pb2.MemoryTag.ValueType) -> None:
        self.resident = resident

    def GetRolloutState(self, request: Any, context: Any) -> rollout_pb2.GetRolloutStateResponse:
        return rollout_pb2.GetRolloutStateResponse(resident_tags=self.resident)


def serve(target: str, rollout: FakeRollout) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(1))
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server)
    server.add_insecure_port(target)
    server.start()
    return server


def started(wait: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def still_waits(waiting: threading.Thread) -> bool:
    waiting.join(0.5)
    return waiting.is_alive()


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'rollout.sock'}"


def test_a_rollout_that_does_not_answer_is_not_waited_for(target: str) -> None:
    waiting = started(partial(wait_to_leave, Service.ROLLOUT, target))
    waiting.join(30)
    assert not waiting.is_alive()


def test_one_that_must_serve_is_waited_for_until_it_sleeps_even_if_it_is_restarted_meanwhile(target: str) -> None:
    waiting = started(partial(wait_to_leave, Service.ROLLOUT, target, staying={MemoryTag.WEIGHTS}, must_serve=True))
    assert still_waits(waiting)
    for _ in range(2):
        server = serve(target, FakeRollout(KV_CACHE, WEIGHTS))
        assert still_waits(waiting)
        server.stop(grace=None).wait()
        assert still_waits(waiting)
    server = serve(target, FakeRollout(WEIGHTS))
    waiting.join(30)
    server.stop(grace=None).wait()
    assert not waiting.is_alive()
