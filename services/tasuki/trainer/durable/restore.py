"""Restores a restarted trainer: loads the last checkpoint and replays the commands since."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from google.protobuf.message import Message

from tasuki.config.paths import training_save_path
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import PERFORMANCE_TRAINER_KEYS
from tasuki.trainer.durable.agreement import agree, outline_of
from tasuki.trainer.durable.saves import publish
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.trainer.service.saving import read_written
from tasuki.trainer.service.training import Training
from tasuki.v1.ranks_pb2 import LogOutline, TrainingRecord
from tasuki.wire.errors import InvalidArgument, TasukiError, from_reason

_log = logging.getLogger("tasuki.trainer")


class Store(Protocol):
    """A store shared by all trainers of a fleet's start."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes:
        """Waits until the key is set."""
        ...


def recipe(config: NodeConfig) -> str:
    """Settings that the results of a log depend on besides its commands."""
    alone = f"{config.model.path.resolve()} {config.trainer.model_dump_json(exclude=PERFORMANCE_TRAINER_KEYS)}"
    return alone if config.fleet is None else f"{alone} node {config.fleet.node_rank} of {config.fleet.num_nodes}"


async def agree_on_log(log: TrainingLog, store: Store, *, config: NodeConfig) -> None:
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
    num_commands = 0
    for record in log.records():
        num_commands += 1
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
            role, config, samples = training.decode_forward_backward(
                logged.role, logged.loss, logged.samples, is_share=logged.is_share
            )
            return await training.forward_backward(role, logged.loss, config, samples)
        case "begin_run":
            return await training.begin_run(record.begin_run)
        case "optim_step":
            return await training.optim_step(record.optim_step)
        case "discard_gradients":
            return await training.discard_gradients(record.discard_gradients)
        case other:
            raise AssertionError(f"no command {other}")
