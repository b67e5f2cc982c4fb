"""Restores a restarted trainer: loads the last checkpoint and replays the commands since."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from google.protobuf.message import Message

from tasuki.config.paths import replay_path, training_save_path
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import PERFORMANCE_TRAINER_KEYS
from tasuki.trainer.durable.saves import publish
from tasuki.trainer.durable.training_log import Pending, TrainingLog, follow
from tasuki.trainer.rank_store import FleetStore
from tasuki.trainer.service.saving import read_written
from tasuki.trainer.service.training import Training
from tasuki.v1.ranks_pb2 import LogOutline, TrainingRecord
from tasuki.wire.errors import InvalidArgument, TasukiError, from_reason

_log = logging.getLogger("tasuki.trainer")


def recipe(config: NodeConfig) -> str:
    """Settings that the results of a log depend on besides its commands."""
    alone = f"{config.model.path.resolve()} {config.trainer.model_dump_json(exclude=PERFORMANCE_TRAINER_KEYS)}"
    return alone if config.fleet is None else f"{alone} node {config.fleet.node_rank} of {config.fleet.num_nodes}"


async def agree_on_log(log: TrainingLog, store: FleetStore, *, config: NodeConfig) -> None:
    """Trims the log to what all nodes of the fleet have, so that they replay it in step.

    store: of this start of all trainers. Raises InvalidArgument if their logs build on different checkpoints.
    """
    fleet = config.fleet
    assert fleet is not None
    written = read_written(training_save_path(config.state_dir))
    mine = outline_of(list(log.records()), written_save_id="" if written is None else written.save_id)

    def exchange() -> list[LogOutline]:
        store.set(f"log/{fleet.node_rank}", mine.SerializeToString())
        return [LogOutline.FromString(store.get(f"log/{rank}")) for rank in range(fleet.num_nodes)]

    agreement = agree(await asyncio.to_thread(exchange), node_rank=fleet.node_rank)
    if agreement.publishes_written:
        assert written is not None
        await asyncio.to_thread(publish, Path(written.checkpoint.path), written.save_id)
        await log.saved(written)
    log.keep(agreement.num_commands)
    _log.info(
        "event=log_agreed num_commands=%d had=%d publishes=%s",
        agreement.num_commands,
        len(mine.commands),
        agreement.publishes_written,
    )


async def restore(training: Training, log: TrainingLog, *, config: NodeConfig) -> None:
    """Replays the log's commands and keeps their answers for callers that ask again.

    Raises InvalidArgument if the log belongs to another model or other settings, PathNotFound if its checkpoint is gone, and the errors
    of loading it.
    """
    started = time.perf_counter()
    num_commands, total, told = 0, sum(1 for _ in log.records()), replay_path(config.state_dir)
    for record in log.records():
        num_commands += 1
        told.write_text(f"replaying command {num_commands} of {total}")
        if record.recipe != recipe(config):
            raise InvalidArgument(
                "state_dir",
                "its training.log belongs to another model or other [trainer] settings; remove it, or use `tasuki up` without "
                "--resume, which sets it aside",
            )
        answer: Message | TasukiError
        try:
            async with training.state.training():
                answer = await _carry_out(training, record)
        except TasukiError as error:
            if record.WhichOneof("command") == "checkpoint":
                advice = (
                    "training.log builds on it: restore it, or `tasuki up` without --resume and then `tasuki train --resume`"
                )
                raise from_reason(error.reason, f"{error.message}; {advice}", dict(error.metadata)) from error
            answer = error
        if record.request_id:
            training.state.gate.restore(record.request_id, content=record.digest, answer=answer)
    told.unlink(missing_ok=True)
    if num_commands:
        _log.info(
            "event=restored num_commands=%d policy_version=%d has_gradients=%s seconds=%.2f",
            num_commands,
            training.state.policy_version,
            training.state.has_gradients,
            time.perf_counter() - started,
        )


async def _carry_out(training: Training, record: TrainingRecord) -> Message:
    match record.WhichOneof("command"):
        case "checkpoint":
            loaded = await training.load_checkpoint(record.checkpoint)
            return record.save_answer if record.HasField("save_answer") else loaded
        case "forward_backward":
            logged = record.forward_backward
            role, config, samples = training.decode_forward_backward(logged, logged.samples)
            return await training.forward_backward(role, logged, config, samples)
        case "begin_run":
            return await training.begin_run(record.begin_run)
        case "optim_step":
            return await training.optim_step(record.optim_step)
        case "discard_gradients":
            return await training.discard_gradients(record.discard_gradients)
        case other:
            raise AssertionError(f"no command {other}")


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a node adjusts its log before replaying it."""

    publishes_written: bool
    """Whether to publish the save that it has written, because another node has, and rebase its log on it."""
    num_commands: int
    """Number of commands to keep afterwards."""


def outline_of(records: Sequence[TrainingRecord], *, written_save_id: str) -> LogOutline:
    kinds = [record.WhichOneof("command") or "" for record in records]
    pending: Pending[str] = {}
    first = records[0] if kinds[:1] == ["checkpoint"] else None
    names = [f"{kind} {record.request_id}" for kind, record in zip(kinds, records, strict=True)]
    if first is not None:
        # Each node's part of a save has its own request and folder.
        names[0] = f"checkpoint {first.save_id or first.request_id}"
    for record, name in zip(records, names, strict=True):
        follow(pending, record, name)
    return LogOutline(
        commands=names,
        pending=chain(*pending.values()),
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
    commands = [f"checkpoint {save_id}", *outline.pending]
    return LogOutline(commands=commands, pending=outline.pending, save_id=save_id)
