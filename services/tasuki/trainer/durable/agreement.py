"""The common part of a fleet's training logs. A command that some node lacks was never acknowledged. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from tasuki.v1.ranks_pb2 import LogOutline, TrainingRecord
from tasuki.wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a node adjusts its log before replaying it."""

    publishes_written: bool
    """Whether to publish the save that it has written, because another node has, and rebase its log on it."""
    num_commands: int
    """Number of commands to keep afterwards."""


def outline_of(records: Sequence[TrainingRecord], *, written_save_id: str) -> LogOutline:
    kinds = [record.WhichOneof("command") or "" for record in records]
    num_pending = len(list(takewhile(lambda kind: kind == "forward_backward", reversed(kinds))))
    first = records[0] if kinds[:1] == ["checkpoint"] else None
    names = [f"{kind} {record.request_id}" for kind, record in zip(kinds, records, strict=True)]
    if first is not None:
        # Each node's part of a save has its own request and folder.
        names[0] = f"checkpoint {first.save_id or first.request_id}"
    return LogOutline(
        commands=names,
        num_pending=num_pending,
        save_id="" if first is None else first.save_id,
        written_save_id=written_save_id,
    )


def agree(outlines: Sequence[LogOutline], *, node_rank: int) -> Agreement:
    """Decides for node `node_rank`; all nodes then have the same commands. outlines: of all nodes, by rank.

    A save is published only after all nodes have written it. If one log builds on it, all can.
    Raises InvalidArgument if the logs otherwise build on different checkpoints.
    """
    publishes = False
    for save_id in sorted({outline.save_id for outline in outlines} - {""}):
        is_behind = [outline.save_id != save_id for outline in outlines]
        if all(outline.written_save_id == save_id for outline, is_it in zip(outlines, is_behind, strict=True) if is_it):
            publishes = is_behind[node_rank]
            outlines = [_rebased(each, save_id) if is_it else each for each, is_it in zip(outlines, is_behind, strict=True)]
            break
    bases = [_base(outline) for outline in outlines]
    if len(set(bases)) > 1:
        other = next(rank for rank, base in enumerate(bases) if base != bases[node_rank])
        raise InvalidArgument(
            "state_dir",
            f"the training logs of nodes {node_rank} and {other} build on different checkpoints; start the fleet without --resume, and "
            "then run `tasuki train --resume` from a checkpoint that all nodes have",
        )
    alike = takewhile(lambda same: len(set(same)) == 1, zip(*(outline.commands for outline in outlines), strict=False))
    return Agreement(publishes_written=publishes, num_commands=len(list(alike)))


def _base(outline: LogOutline) -> str:
    """The checkpoint that a log builds on; empty for the initial weights."""
    return next((name for name in outline.commands[:1] if name.startswith("checkpoint ")), "")


def _rebased(outline: LogOutline, save_id: str) -> LogOutline:
    """The log after rebasing on the save: only commands that await an optimizer step are left."""
    num_left = outline.num_pending
    commands = list(outline.commands)[len(outline.commands) - num_left :]
    return LogOutline(commands=[f"checkpoint {save_id}", *commands], num_pending=num_left, save_id=save_id)
