"""What the service's messages have in common: stages, tags, deadlines, as they are on the wire and inside."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from tasuki.memory.stages import Rpc, Service, Stage, stages_of
from tasuki.memory.tags import MemoryTag
from tasuki.rpc.stages import stage_from_proto
from tasuki.rpc.usage import TAGS
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument

# Tags that stages name; captured graphs' memory goes with the cache.
_NAMED = (types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE)
# rpc/ refuses a mutating call without a deadline.
_NO_DEADLINE_S = 600.0


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining


def decode_stage(value: types_pb2.Stage.ValueType, rpc: Rpc) -> Stage:
    """Raises InvalidArgument naming what the call takes."""
    stage, allowed = stage_from_proto(value), stages_of(Service.ROLLOUT, rpc)
    if stage is None or stage not in allowed:
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {stage or value}")
    return stage


def decode_tags(values: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
    """Raises InvalidArgument naming the tag that rollout does not have."""
    for index, value in enumerate(values):
        if value not in _NAMED:
            raise InvalidArgument(f"tags[{index}]", f"rollout has {', '.join(TAGS[tag] for tag in _NAMED)}, not tag {value}")
    return [TAGS[value] for value in values]
