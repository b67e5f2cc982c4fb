"""Saves and restores a rank's training state by torch.distributed.checkpoint. Every rank makes the same calls.

A checkpoint is a folder: torch's files with model, optimizer and random state, their index, and checkpoint.json. Nothing in it is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.optim import Optimizer

from tasuki.trainer.backends.fsdp.checkpoint_files import TensorReader, TensorWriter, damaged
from tasuki.trainer.backends.fsdp.lora import trained_parameters
from tasuki.trainer.durable.atomic_folder import cannot_write, drop_aside, folder_bytes, rename_into_place, start_aside
from tasuki.wire.errors import InvalidArgument, PathNotFound, VersionOrder

_FACTS_FILE = "checkpoint.json"
_FORMAT = 2
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a checkpoint without reading its tensors."""

    policy_version: int
    num_ranks: int
    architecture: str
    lora_rank: int | None = None
    """Of the adapters that are all the model it holds; None for a whole one."""


_Fields = TypeAdapter(dict[str, Any])
_Facts = TypeAdapter(CheckpointFacts)


def save_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer, facts: CheckpointFacts) -> int:
    """Writes aside, fsyncs, renames. Returns the bytes written.

    Raises PathExists when something is at `path`, DiskFull when there is no room, InvalidArgument when it cannot be written at all. Then
    nothing is there, and what earlier saves wrote is as it was.
    """
    aside = start_aside(path)
    tensors = _training_tensors(model, optimizer) | {_random_key(): torch.get_rng_state()}
    try:
        dcp.save(tensors, storage_writer=TensorWriter(aside, sync_files=True))
    except CheckpointException as error:
        drop_aside(aside, path=path)
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise cannot_write(path, failure) from error
        raise InvalidArgument("path", f"{path} cannot be written: {_cause(error)}") from error
    fields = {"format": _FORMAT, **{name: getattr(facts, name) for name in CheckpointFacts.__slots__}}
    rename_into_place(aside, path, last_files={_FACTS_FILE: json.dumps(fields, indent=2)})
    return folder_bytes(path)


def read_facts(path: Path) -> CheckpointFacts:
    """Raises PathNotFound without a checkpoint at `path`, InvalidArgument when it is not one of ours."""
    if not (path / _FACTS_FILE).is_file():
        raise PathNotFound(f"{path} is no checkpoint: it has no {_FACTS_FILE}", path=path)
    try:
        content = (path / _FACTS_FILE).read_bytes()
        if _Fields.validate_json(content).get("format") != _FORMAT:
            raise InvalidArgument("path", f"{path} is of a format that this version does not read")
        return _Facts.validate_json(content, strict=True)
    except ValidationError as error:
        raise damaged(path / _FACTS_FILE, error) from error


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer, have: CheckpointFacts) -> int:
    """Restores model and optimizer, and the random state if the number of ranks is the same. Returns the policy version.

    All or nothing: the tensors are read beside the present ones, which change only when all are there.
    Raises VersionOrder when the checkpoint is older than `have`, and what read_facts raises.
    """
    facts = read_facts(path)
    if facts.architecture != have.architecture:
        raise InvalidArgument("path", f"{path} holds a {facts.architecture}, the trainer runs a {have.architecture}")
    if facts.lora_rank != have.lora_rank:
        kinds = [f"adapters of rank {rank}" if rank else "a whole model" for rank in (facts.lora_rank, have.lora_rank)]
        raise InvalidArgument("path", f"{path} holds {kinds[0]}, the trainer trains {kinds[1]}")
    if facts.policy_version < have.policy_version:
        raise VersionOrder(
            f"{path} has policy version {facts.policy_version}, the trainer is at {have.policy_version}; versions only grow: "
            "restart the trainer to go back",
            have=have.policy_version,
            want=facts.policy_version,
        )
    reader = TensorReader(path)
    present = _training_tensors(model, optimizer)
    loaded: dict[str, Tensor] = {name: torch.empty_like(tensor) for name, tensor in present.items()}
    if facts.num_ranks == have.num_ranks:
        loaded[_random_key()] = torch.get_rng_state()
    try:
        dcp.load(loaded, storage_reader=reader)
    except CheckpointException as error:
        raise InvalidArgument("path", f"{path} cannot be restored: {_cause(error)}") from error
    _set_training_tensors(model, optimizer, loaded)
    if facts.num_ranks == have.num_ranks:
        torch.set_rng_state(loaded[_random_key()])
    return facts.policy_version


def _training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What is trained and AdamW's state, by name; every parameter has made as many steps."""
    tensors: dict[str, Tensor] = {}
    for name, param in trained_parameters(model):
        state = optimizer.state[param]
        tensors[f"model.{name}"] = param.detach()
        for moment in _MOMENTS:
            tensors[f"optimizer.{moment}.{name}"] = state[moment]
        tensors["optimizer.step"] = state["step"]
    return tensors


@torch.no_grad()
def _set_training_tensors(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    for name, param in trained_parameters(model):
        param.copy_(tensors[f"model.{name}"])
        state = optimizer.state[param]
        for moment in _MOMENTS:
            state[moment].copy_(tensors[f"optimizer.{moment}.{name}"])
        state["step"].copy_(tensors["optimizer.step"])


def _random_key() -> str:
    return f"random_state.{dist.get_rank()}"


def _cause(error: CheckpointException) -> str:
    """The first rank's failure, without torch's traceback."""
    failure = next(iter(error.failures.values()), (error, None))[0]
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
