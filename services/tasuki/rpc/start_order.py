"""Waits, in a service that starts beside the other one, until the other has left the GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import grpc

from tasuki.v1.rollout_pb2 import GetRolloutStateRequest
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2 import GetTrainerStateRequest
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.stages import MemoryTag, Stage

_log = logging.getLogger("tasuki.rpc")
_POLL_S = 0.2
_READ_TIMEOUT_S = 5.0


def wait_for_trainer_to_leave(target: str) -> None:
    """Returns when the trainer is offloaded, except for what stays beside an engine, or no trainer answers.

    A starting engine takes all the memory that is free.
    """
    with open_blocking_channel(target) as channel:
        stub = TrainerServiceStub(channel)

        def resident_tags() -> Sequence[int]:
            state = stub.GetTrainerState(GetTrainerStateRequest(), timeout=_READ_TIMEOUT_S)
            return () if Stage.of(state.stage) is Stage.OFFLOAD else state.resident_tags

        _wait(resident_tags, "trainer")


def wait_for_rollout_to_leave(target: str, *, staying: Collection[MemoryTag] = (), must_serve: bool = False) -> None:
    """Returns when no tag of rollout but `staying` is resident, or no rollout answers: a trainer loads its model when it starts.

    must_serve: rollout starts too, so one that does not answer is waited for.
    """
    with open_blocking_channel(target) as channel:
        stub = RolloutServiceStub(channel)

        def resident_tags() -> list[int]:
            state = stub.GetRolloutState(GetRolloutStateRequest(), timeout=_READ_TIMEOUT_S)
            return [tag for tag in state.resident_tags if MemoryTag.of(tag) not in staying]

        _wait(resident_tags, "rollout", must_serve=must_serve)


def _wait(resident_tags: Callable[[], Sequence[int]], service: str, *, must_serve: bool = False) -> None:
    started, is_told = time.monotonic(), False
    while True:
        try:
            has_left = not resident_tags()
        except grpc.RpcError as error:
            # Any other error means that the service is there, but busy.
            has_left = not must_serve and cast(grpc.Call, error).code() is grpc.StatusCode.UNAVAILABLE
        if has_left:
            _log.info("event=room seconds=%.1f", time.monotonic() - started)
            return
        if not is_told:
            _log.info("event=waiting_for_room service=%s", service)
            is_told = True
        time.sleep(_POLL_S)
