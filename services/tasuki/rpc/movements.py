"""Movements after a stage's answer, on the wire: of a rank, of all ranks of a service, of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasuki.memory.tags import Moved, Movement, MovementKind
from tasuki.rpc.usage import TAG_VALUES, TAGS
from tasuki.v1 import memory_pb2, types_pb2


def pause_response(moved: Moved) -> memory_pb2.PauseResponse:
    begun, ended = encode_movements(moved.begun), encode_movements(moved.ended)
    return memory_pb2.PauseResponse(released_bytes=moved.num_bytes, begun=begun, ended=ended)


def resume_response(moved: Moved) -> memory_pb2.ResumeResponse:
    begun, ended = encode_movements(moved.begun), encode_movements(moved.ended)
    return memory_pb2.ResumeResponse(mapped_bytes=moved.num_bytes, begun=begun, ended=ended)


def moved_by(responses: Sequence[memory_pb2.PauseResponse | memory_pb2.ResumeResponse]) -> Moved:
    """Merges the ranks' answers: bytes are summed, and the end is the slowest rank's."""
    return Moved(
        sum(one.released_bytes if isinstance(one, memory_pb2.PauseResponse) else one.mapped_bytes for one in responses),
        begun=_joined(movement for one in responses for movement in decode_movements(one.begun)),
        ended=_joined(movement for one in responses for movement in decode_movements(one.ended)),
    )


def encode_movements(movements: Iterable[Movement]) -> list[types_pb2.Movement]:
    return [_encoded(one) for one in movements]


def decode_movements(messages: Iterable[types_pb2.Movement]) -> tuple[Movement, ...]:
    """Decodes movements, without tags and kinds that this build does not know."""
    known = types_pb2.MovementKind.values()
    return tuple(
        Movement(
            kind=MovementKind(types_pb2.MovementKind.Name(one.kind).removeprefix("MOVEMENT_KIND_")),
            tag=TAGS[one.tag],
            num_bytes=one.bytes,
            seconds=one.seconds,
            end_time=one.end_time.ToNanoseconds() / 1e9,
        )
        for one in messages
        if one.tag in TAGS and one.kind in known and one.kind != types_pb2.MOVEMENT_KIND_UNSPECIFIED
    )


def _encoded(movement: Movement) -> types_pb2.Movement:
    kind = types_pb2.MovementKind.Value(f"MOVEMENT_KIND_{movement.kind}")
    message = types_pb2.Movement(kind=kind, tag=TAG_VALUES[movement.tag], bytes=movement.num_bytes, seconds=movement.seconds)
    if movement.end_time:
        message.end_time.FromNanoseconds(int(movement.end_time * 1e9))
    return message


def _joined(movements: Iterable[Movement]) -> tuple[Movement, ...]:
    joined: dict[tuple[MovementKind, str], Movement] = {}
    for one in movements:
        other = joined.get((one.kind, one.tag), Movement(one.kind, one.tag, 0))
        joined[one.kind, one.tag] = Movement(
            one.kind,
            one.tag,
            one.num_bytes + other.num_bytes,
            max(one.seconds, other.seconds),
            max(one.end_time, other.end_time),
        )
    return tuple(joined.values())
