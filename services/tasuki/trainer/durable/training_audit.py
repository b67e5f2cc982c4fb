"""Invariant of a trainer's log: nothing is trained twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.v1.ranks_pb2 import TrainingRecord


def first_repetition(records: Sequence[TrainingRecord]) -> str:
    """Describes the first record that cannot follow those before it; empty if there is none."""
    seen: set[str] = set()
    has_gradients = False
    for number, record in enumerate(records):
        command = record.WhichOneof("command") or "nothing"
        name = f"record {number} ({command}, request id {record.request_id!a})"
        if record.request_id and record.request_id in seen:
            return f"one record of each command, found {name} again"
        if command == "checkpoint" and number:
            return f"a checkpoint as the first record only, found {name}"
        if command == "optim_step" and not has_gradients:
            return f"gradients before {name}"
        seen.add(record.request_id)
        has_gradients = command == "forward_backward"
    return ""
