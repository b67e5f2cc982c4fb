"""Decoding common to the service's messages: stages, tags, deadlines."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from tasuki.memory.stages import Rpc, Service, Stage, stages_of
from tasuki.memory.tags import MemoryTag
from tasuki.rpc.stages import stage_from_proto
from tasuki.rpc.usage import TAGS
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument

# Tags that stages may name; memory of captured graphs follows the cache.
_NAMED = (types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE)
# rpc/ has already refused mutating calls without a deadline.
_NO_DEADLINE_S = 600.0


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Seconds until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining


def decode_stage(value: types_pb2.Stage.ValueType, rpc: Rpc) -> Stage:
    """Raises InvalidArgument naming the stages that the call accepts."""
    stage, allowed = stage_from_proto(value), stages_of(Service.ROLLOUT, rpc)
    if stage is None or stage not in allowed:
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {stage or value}")
    return stage


def decode_tags(values: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
    """Raises InvalidArgument naming a tag that rollout does not have."""
    for index, value in enumerate(values):
        if value not in _NAMED:
            raise InvalidArgument(f"tags[{index}]", f"rollout has {', '.join(TAGS[tag] for tag in _NAMED)}, not tag {value}")
    return [TAGS[value] for value in values]
