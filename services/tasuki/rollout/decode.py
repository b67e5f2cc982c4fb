"""What the service's messages have in common: stages, tags, deadlines, as they are on the wire and inside."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from tasuki.memory.tags import MemoryTag
from tasuki.rollout.stages import Stage
from tasuki.rpc.usage import TAGS
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument

STAGES: dict[types_pb2.Stage.ValueType, Stage] = {
    types_pb2.STAGE_UNSPECIFIED: Stage.START,
    types_pb2.STAGE_RESUME_WEIGHTS: Stage.RESUME_WEIGHTS,
    types_pb2.STAGE_SYNC: Stage.SYNC,
    types_pb2.STAGE_RESUME_KV: Stage.RESUME_KV,
    types_pb2.STAGE_DRAIN: Stage.DRAIN,
    types_pb2.STAGE_PAUSE_KV: Stage.PAUSE_KV,
    types_pb2.STAGE_PAUSE_WEIGHTS: Stage.PAUSE_WEIGHTS,
}
STAGE_VALUES = {stage: value for value, stage in STAGES.items()}
# Tags that stages name; captured graphs' memory goes with the cache.
_NAMED = (types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE)
# rpc/ refuses a mutating call without a deadline.
_NO_DEADLINE_S = 600.0


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining


def decode_stage(value: types_pb2.Stage.ValueType, allowed: tuple[Stage, ...]) -> Stage:
    """Raises InvalidArgument naming what the call takes."""
    stage = STAGES.get(value)
    if stage is None or stage not in allowed:
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {stage if stage is not None else value}")
    return stage


def decode_tags(values: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
    """Raises InvalidArgument naming the tag that rollout does not have."""
    for index, value in enumerate(values):
        if value not in _NAMED:
            raise InvalidArgument(f"tags[{index}]", f"rollout has {', '.join(TAGS[tag] for tag in _NAMED)}, not tag {value}")
    return [TAGS[value] for value in values]
