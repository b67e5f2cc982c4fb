"""Waits, in a service that starts beside the other one, until the other has left the GPU."""

import logging
import time
from collections.abc import Collection
from functools import partial
from typing import cast

import grpc

from tasuki.v1.rollout_pb2 import GetRolloutStateRequest
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2 import GetTrainerStateRequest
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.stages import MemoryTag, Service, Stage

_log = logging.getLogger("tasuki.rpc")
_POLL_S = 0.2
_READ_TIMEOUT_S = 5.0


def wait_to_leave(service: Service, target: str, *, staying: Collection[MemoryTag] = (), must_serve: bool = False) -> None:
    """Returns when the service holds nothing but what stays, or does not answer: a starting engine takes all the memory that is free.

    staying: tags of rollout that stay; an offloaded trainer has left whatever it keeps. must_serve: the service starts too, so one that
    does not answer is waited for.
    """
    started, is_told = time.monotonic(), False
    with open_blocking_channel(target) as channel:
        if service is Service.TRAINER:
            read_state = partial(TrainerServiceStub(channel).GetTrainerState, GetTrainerStateRequest())
        else:
            read_state = partial(RolloutServiceStub(channel).GetRolloutState, GetRolloutStateRequest())
        while True:
            try:
                state = read_state(timeout=_READ_TIMEOUT_S)
                is_offloaded = Stage.of(state.stage) is Stage.OFFLOAD
                has_left = is_offloaded or all(MemoryTag.of(tag) in staying for tag in state.resident_tags)
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
