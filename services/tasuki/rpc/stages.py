"""Stages and tags of a stage command on the wire."""

from __future__ import annotations

from tasuki.memory.stages import RULES, Stage
from tasuki.rpc.usage import TAG_VALUES
from tasuki.v1 import types_pb2


def stage_to_proto(stage: Stage | None) -> types_pb2.Stage.ValueType:
    """UNSPECIFIED for None."""
    return types_pb2.Stage.Value(f"STAGE_{stage}") if stage else types_pb2.STAGE_UNSPECIFIED


def stage_from_proto(number: types_pb2.Stage.ValueType) -> Stage | None:
    """None for UNSPECIFIED and for numbers that this build does not know."""
    if number == types_pb2.STAGE_UNSPECIFIED or number not in types_pb2.Stage.values():
        return None
    return Stage(types_pb2.Stage.Name(number).removeprefix("STAGE_"))


def named_tags(stage: Stage) -> tuple[types_pb2.MemoryTag.ValueType, ...]:
    """The tags that the Pause or Resume of `stage` names."""
    return tuple(TAG_VALUES[tag] for tag in RULES[stage].named_tags)
