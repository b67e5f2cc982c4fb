"""Stages and tags of a stage command on the wire."""

from __future__ import annotations

from tasuki.memory.stages import RULES, Rpc, Service, Stage, stages_of
from tasuki.memory.tags import MemoryTag
from tasuki.rpc.usage import TAG_VALUES, TAGS
from tasuki.v1 import types_pb2
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.wire.errors import InvalidArgument


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


def decode_move(request: PauseRequest | ResumeRequest, service: Service) -> tuple[Stage, list[MemoryTag]]:
    """The stage of a Pause or Resume, and the tags that it names; none at all is allowed: the stage then only counts.

    Raises InvalidArgument for a stage that `service` does not carry out by this RPC, and for a tag that the stage does not move.
    """
    rpc = Rpc.PAUSE if isinstance(request, PauseRequest) else Rpc.RESUME
    stage, allowed = stage_from_proto(request.stage), stages_of(service, rpc)
    if stage is None or stage not in allowed:
        given = stage or _unnamed(request.stage, "stage")
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {given}")
    moved = RULES[stage].named_tags
    for index, value in enumerate(request.tags):
        tag = TAGS.get(value)
        if tag not in moved:
            given = tag or _unnamed(value, "tag")
            raise InvalidArgument(f"tags[{index}]", f"stage {stage} moves {', '.join(moved)}, not {given}")
    return stage, [TAGS[value] for value in request.tags]


def _unnamed(number: int, kind: str) -> str:
    """Text for a number on the wire that has no name here."""
    return f"an unset {kind}" if number == 0 else f"the unknown {kind} {number}"
