"""What both memory services share: tags that a stage names, tags that stay, the usage of their ranks, and the wait for the other."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import grpc

from tasuki.config.choices import Choices
from tasuki.config.schema import NodeConfig
from tasuki.rpc.commands import remaining_s
from tasuki.v1 import memory_pb2, memory_pb2_grpc
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.v1.rollout_pb2 import GetRolloutStateRequest
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2 import GetTrainerStateRequest
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import DeviceUsage, TagUsage
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument
from tasuki.wire.stages import RULES, MemoryTag, Rpc, Service, Stage, WireEnum, stages_of

USAGE_TIMEOUT_S = 4.0
"""How long ranks may take to answer; they do between two calls. Below the time that the command line waits."""
_INTERVAL_MS = range(20, 60_001)
_DEFAULT_INTERVAL_MS = 1000


def decode_move(request: PauseRequest | ResumeRequest, service: Service) -> tuple[Stage, list[MemoryTag]]:
    """The stage of a Pause or Resume, and the tags that it names; none at all is allowed: the stage then only counts.

    Raises InvalidArgument for a stage that `service` does not carry out by this RPC, and for a tag that the stage does not move.
    """
    rpc = Rpc.PAUSE if isinstance(request, PauseRequest) else Rpc.RESUME
    stage, allowed = Stage.of(request.stage), stages_of(service, rpc)
    if stage is None or stage not in allowed:
        given = _given(Stage, request.stage)
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {given}")
    moved = RULES[stage].named_tags
    for index, value in enumerate(request.tags):
        if MemoryTag.of(value) not in moved:
            given = _given(MemoryTag, value)
            raise InvalidArgument(f"tags[{index}]", f"stage {stage} moves {', '.join(moved)}, not {given}")
    return stage, MemoryTag.all_of(request.tags)


def _given(kind: type[WireEnum], number: int) -> str:
    name = "tag" if kind is MemoryTag else "stage"
    return kind.of(number) or (f"the unknown {name} {number}" if number else f"an unset {name}")


def usage_response(tags: Sequence[TagUsage], device: DeviceUsage) -> memory_pb2.GetUsageResponse:
    """Response of one rank."""
    response = memory_pb2.GetUsageResponse(tags=tags, devices=[device])
    for tag in response.tags:
        tag.rank = device.rank
    return response


def joined(answers: Sequence[memory_pb2.GetUsageResponse]) -> memory_pb2.GetUsageResponse:
    """Merged response of all ranks."""
    return memory_pb2.GetUsageResponse(
        tags=[tag for answer in answers for tag in answer.tags],
        devices=[device for answer in answers for device in answer.devices],
    )


class UsageServicer(memory_pb2_grpc.MemoryServiceServicer):
    """GetUsage and WatchUsage of a service's ranks. Each service adds its moves."""

    def __init__(self, usage: Callable[[memory_pb2.GetUsageRequest, float], Awaitable[memory_pb2.GetUsageResponse]]) -> None:
        """usage: asks all ranks, within some seconds; raises DeadlineExceeded while they are in the middle of something long."""
        self._usage = usage

    async def GetUsage(self, request: memory_pb2.GetUsageRequest, context: Any) -> memory_pb2.GetUsageResponse:
        # Of a shorter deadline a part, so that the caller hears why it was not met.
        return await self._usage(request, min(USAGE_TIMEOUT_S, 0.9 * remaining_s(context)))

    async def WatchUsage(
        self, request: memory_pb2.WatchUsageRequest, context: Any
    ) -> AsyncIterator[memory_pb2.WatchUsageResponse]:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
        if interval_ms not in _INTERVAL_MS:
            raise InvalidArgument("interval_ms", f"{interval_ms} ms; from {_INTERVAL_MS.start} to {_INTERVAL_MS.stop - 1}")
        clock = asyncio.get_running_loop()
        while True:
            started = clock.time()
            try:
                response = memory_pb2.WatchUsageResponse(usage=await self._usage(memory_pb2.GetUsageRequest(), USAGE_TIMEOUT_S))
            except DeadlineExceeded:
                continue
            response.time.GetCurrentTime()
            yield response
            await asyncio.sleep(max(0.0, started + interval_ms / 1000 - clock.time()))


def staying_of_engine_rank(config: NodeConfig, choices: Choices, rank: int) -> frozenset[MemoryTag]:
    """Tags that one engine rank does not release: the planner's, and the base below adapters, which is never sent again."""
    names = choices.of_rollout(rank)
    base = [] if config.served_adapter is None else [MemoryTag.WEIGHTS]
    graphs = [MemoryTag.CUDA_GRAPH] if MemoryTag.KV_CACHE in names else []
    return frozenset([*(tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in names), *base, *graphs])


def staying_tags(config: NodeConfig, choices: Choices, service: Service) -> frozenset[MemoryTag]:
    """Tags that every rank of the service keeps."""
    if service is Service.ROLLOUT:
        ranks = [staying_of_engine_rank(config, choices, rank) for rank in range(config.num_engine_ranks)]
    else:
        names = [choices.of_trainer(rank) for rank in range(config.trainer.num_ranks)]
        ranks = [frozenset(tag for tag in MemoryTag if tag in each) for each in names]
    return frozenset.intersection(*ranks)


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
