"""Saves and restores a rank's training state with torch.distributed.checkpoint. All calls are collective.

A checkpoint is a folder of torch's files with model, optimizer and random state, their index, and checkpoint.json. It contains no code.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from transformers import PreTrainedConfig

from tasuki.config.trainer_schema import LoraConfig, TrainerConfig
from tasuki.models.family import computing_keys
from tasuki.models.known import find_family
from tasuki.trainer.backend import Progress
from tasuki.trainer.durable.atomic_folder import (
    cannot_write,
    claim_aside,
    delete_aside,
    rename_into_place,
    start_aside,
)
from tasuki.trainer.durable.checkpoint_files import (
    DamagedFile,
    TensorReader,
    TensorWriter,
    damaged,
    index_checksum,
)
from tasuki.trainer.durable.saves import FACTS_FILE, MAX_FACTS_BYTES, folder_bytes, written_path
from tasuki.trainer.wire import Role
from tasuki.weights.export import Shard
from tasuki.wire.denied_path import denied, named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_regular
from tasuki.wire.sealed_json import is_intact, sealed

_FORMAT = 4
_MORE = {"type", "dropout_position", "use_dora", "dropout", "exclude_modules", "rank_pattern", "alpha_pattern"}
_INDEX_SUM = "tensors_crc32"
_RANDOM_STATE = "random_state."
_Version = Annotated[int, Field(ge=0, le=2**53)]
"""Leaves room for steps: the coordinator's journal holds 64-bit integers."""


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """One network of a checkpoint."""

    version: _Version
    """Number of optimizer steps in its weights."""
    schedule_start: _Version
    """The version at which its learning-rate schedule began."""
    architecture: str
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """LoRA rank if only adapters are saved; None for a whole network."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of their output, times the rank; None for a whole network, and in checkpoints that do not say."""
    lora_use_rslora: bool = False
    """Whether their output is scaled by alpha / sqrt(rank)."""
    lora_more: dict[str, Any] = field(default_factory=dict)
    """Other keys of [trainer.lora] on which results depend, if they are set."""
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json on which results depend, with their values; empty in checkpoints that do not say."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Facts about a checkpoint, readable without its tensors."""

    num_ranks: Annotated[int, Field(ge=1, lt=2**31)]
    roles: dict[Role, RoleFacts]
    optimizer_8bit: bool = False

    @property
    def progress(self) -> dict[Role, Progress]:
        return {role: Progress(each.version, each.schedule_start) for role, each in self.roles.items()}


class Slices(Tensor):
    """This rank's slices of a tensor, of which others hold the rest. It has a shape and no elements.

    Implements torch.distributed._checkpointable._Checkpointable, which torch asks of tensors alone.
    """

    _shards: list[Shard]

    @staticmethod
    def of(shape: Sequence[int], shards: Sequence[Shard]) -> "Slices":
        slices: Any = Tensor._make_wrapper_subclass(Slices, torch.Size(shape))
        slices._shards = list(shards)
        return slices

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of slices")

    def empty(self) -> "Slices":
        """Slices of the same places."""
        return Slices.of(self.shape, [replace(shard, local=torch.empty_like(shard.local)) for shard in self._shards])

    def copy_from(self, other: "Slices") -> None:
        """Copies the other's content, of the same places."""
        for shard, source in zip(self._shards, other._shards, strict=True):
            shard.local.copy_(source.local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(shard.offsets), shard.local.shape) for shard in self._shards]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunks = zip(self.__create_chunk_list__(), self._shards, strict=True)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(shard.local), self.shape),
            )
            for chunk, shard in chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(shard.local for shard in self._shards if torch.Size(shard.offsets) == index.offset)


_Fields = TypeAdapter(dict[str, Any])
_Facts = TypeAdapter(CheckpointFacts)


def save_checkpoint(path: Path, *, tensors: Mapping[str, Tensor], facts: CheckpointFacts, save_id: str | None = None) -> int:
    """Writes aside, fsyncs, renames. Returns the bytes written. tensors: of `training_tensors`, by role.

    save_id: of a save of several nodes, left for `durable.saves.publish` to rename; returns 0 if another node writes to the same folder.
    Raises PathExists if `path` exists, DiskFull without space, InvalidArgument if it cannot be written. After an error nothing is at
    `path`, and earlier saves are unchanged.
    """
    aside = start_aside(path) if save_id is None else claim_aside(path, save_id)
    if aside is None:
        return 0
    _write(aside, path, tensors=tensors)
    target, more = (path, {}) if save_id is None else (written_path(path, save_id), {"save_id": save_id})
    rename_into_place(aside, target, finish=lambda: _write_facts(aside, facts, **more))
    return folder_bytes(target)


def _write(aside: Path, path: Path, *, tensors: Mapping[str, Tensor]) -> None:
    try:
        dcp.save({**tensors, _random_key(): torch.get_rng_state()}, storage_writer=TensorWriter(aside, sync_files=True))
    except CheckpointException as error:
        delete_aside(aside, path=path)
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise cannot_write(path, failure) from error
        raise InvalidArgument("path", f"{path} cannot be written: {_cause(_failure(error))}") from error


def _write_facts(folder: Path, facts: CheckpointFacts, **more: str) -> None:
    fields = {"format": _FORMAT, **more, **_Facts.dump_python(facts, mode="json"), _INDEX_SUM: index_checksum(folder)}
    (folder / FACTS_FILE).write_text(sealed(fields))


def read_facts(path: Path) -> tuple[CheckpointFacts, int]:
    """Facts, and the checksum of the index. Raises PathNotFound without a checkpoint at `path`, PathPermissionDenied, InvalidArgument if
    it is foreign, damaged or unreadable.
    """
    file = path / FACTS_FILE
    try:
        with named_if_denied(file):
            content = read_regular(file, max_bytes=MAX_FACTS_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PathNotFound(f"{path} is not a checkpoint: it has no {FACTS_FILE}", path=path) from error
    except OSError as error:
        raise InvalidArgument("path", f"{file} cannot be read: {error.strerror}") from error
    try:
        fields = _Fields.validate_json(content)
        if fields.get("format") != _FORMAT:
            raise InvalidArgument("path", f"{path} has a format that this version cannot read")
        if not is_intact(fields):
            raise InvalidArgument("path", f"{file} is damaged: its checksum differs from the one in it")
        facts = _Facts.validate_json(content, strict=True)
    except ValidationError as error:
        raise damaged(file, error) from error
    for role, each in facts.roles.items():
        if each.schedule_start > each.version:
            problem = f"is {each.schedule_start}, above the version {each.version}"
            raise InvalidArgument("path", f"{file} is damaged: roles.{role}.schedule_start: {problem}")
    return facts, fields.get(_INDEX_SUM, -1)


def check_checkpoint(path: Path, *, tensors: Mapping[str, Tensor], have: CheckpointFacts) -> CheckpointFacts:
    """Reads a checkpoint's facts without its tensors. Raises those errors of load_checkpoint that are then visible."""
    facts, index_crc32 = read_facts(path)
    _check_fits(path, facts, have=have)
    _check_tensors(path, TensorReader(path, index_crc32=index_crc32, progressed=lambda: None).sizes(), tensors=tensors)
    return facts


@torch.no_grad()
def load_checkpoint(
    path: Path, *, tensors: Mapping[str, Tensor], have: CheckpointFacts, progressed: Callable[[], None] = lambda: None
) -> CheckpointFacts:
    """Fills `tensors`, and the random state if the number of ranks is the same. Returns the checkpoint's facts.

    All or nothing: new tensors are read separately, and replace the current ones only once all are complete with correct checksums.
    progressed: called while reading. Raises InvalidArgument if its tensors are not exactly `tensors`, PathPermissionDenied
    for a file, and the errors of read_facts.
    """
    facts, index_crc32 = read_facts(path)
    _check_fits(path, facts, have=have)
    reader = TensorReader(path, index_crc32=index_crc32, progressed=progressed)
    _check_tensors(path, reader.sizes(), tensors=tensors)
    loaded: dict[str, Any] = {
        name: tensor.empty() if isinstance(tensor, Slices) else torch.empty_like(tensor) for name, tensor in tensors.items()
    }
    if facts.num_ranks == have.num_ranks:
        loaded[_random_key()] = torch.get_rng_state()
    read_tensors(path, loaded, reader=reader)
    for name, tensor in tensors.items():
        if isinstance(tensor, Slices):
            tensor.copy_from(loaded[name])
        else:
            tensor.copy_(loaded[name])
    if facts.num_ranks == have.num_ranks:
        torch.set_rng_state(loaded[_random_key()])
    return facts


def read_tensors(path: Path, tensors: Mapping[str, Tensor], *, reader: TensorReader) -> None:
    """Fills the tensors from the checkpoint. Raises PathPermissionDenied, InvalidArgument for a damaged file."""
    try:
        dcp.load(dict(tensors), storage_reader=reader)
    except CheckpointException as error:
        failure = _failure(error)
        if isinstance(failure, PermissionError):
            raise denied(Path(failure.filename or path)) from error
        raise InvalidArgument("path", f"{path} cannot be restored: {_cause(failure)}") from error


def _check_fits(path: Path, facts: CheckpointFacts, *, have: CheckpointFacts) -> None:
    """Raises InvalidArgument if the networks differ from the configuration."""
    if facts.roles.keys() != have.roles.keys():
        kinds = [", ".join(sorted(each.roles)) or "no network" for each in (facts, have)]
        raise InvalidArgument("path", f"{path} holds {kinds[0]}, but the trainer trains {kinds[1]}; see `tasuki export`")
    for role, saved in facts.roles.items():
        mine = have.roles[role]
        if saved.architecture != mine.architecture:
            raise InvalidArgument(
                "path", f"{path} holds a {saved.architecture} as {role}, but the trainer runs a {mine.architecture}"
            )
        if saved.lora_rank != mine.lora_rank:
            kinds = [f"adapters of rank {rank}" if rank else "a whole model" for rank in (saved.lora_rank, mine.lora_rank)]
            raise InvalidArgument("path", f"{path} holds {kinds[0]} as {role}, but the trainer trains {kinds[1]}")
        defaults = LoraConfig().model_dump(mode="json")  # are not stored
        was, is_ = (
            {**defaults, "alpha": each.lora_alpha, "use_rslora": each.lora_use_rslora, **each.lora_more}
            for each in (saved, mine)
        )
        for key in sorted(was.keys() | is_.keys()):
            # An alpha of None is that of a checkpoint that does not say. Of patterns the first that matches counts.
            held, wanted = (list(it.items()) if isinstance(it, dict) else it for it in (was.get(key), is_.get(key)))
            if held != wanted and not (key == "alpha" and None in (was[key], is_[key])):
                problem = f"holds adapters with {key} {was.get(key)} as {role}, but the trainer has {is_.get(key)}"
                raise InvalidArgument("path", f"{path} {problem}; load it with the {key} it was saved with")
        for key in sorted(saved.model.keys() & mine.model.keys()):
            if saved.model[key] != mine.model[key]:
                problem = (
                    f"holds a {role} with {key} {saved.model[key]!r} in config.json, but the trainer's has {mine.model[key]!r}"
                )
                raise InvalidArgument("path", f"{path} {problem}; load it with the model that it was saved with")
    if facts.optimizer_8bit is not have.optimizer_8bit:
        setting = f'trainer.moments {"=" if facts.optimizer_8bit else "other than"} "8bit"'
        raise InvalidArgument(
            "path", f"{path} was saved with {setting}; load it with the same, or start from an exported model"
        )


def _check_tensors(path: Path, sizes: Mapping[str, tuple[int, ...]], *, tensors: Mapping[str, Tensor]) -> None:
    """Raises InvalidArgument unless the checkpoint has exactly `tensors`. Torch would ignore what only the checkpoint has.

    sizes: of the checkpoint's tensors.
    """
    advice = "load it with the model and the adapters' target_modules, train_tower and router_bias_update_rate that it was saved with"
    held = {name for name in sizes if not name.startswith(_RANDOM_STATE)}
    for names, problem in ((held - tensors.keys(), "that the trainer lacks"), (tensors.keys() - held, "not in it")):
        if names:
            first, num_more = min(names), len(names) - 1
            more = f" and {num_more} more" if num_more else ""
            raise InvalidArgument("path", f"{path} has other tensors than the trainer: {first}{more} {problem}; {advice}")
    for name, tensor in tensors.items():
        if sizes[name] != tuple(tensor.shape):
            problem = f"holds {name} of {list(sizes[name])}, but the trainer's has {list(tensor.shape)}"
            raise InvalidArgument("path", f"{path} {problem}; {advice}")


def _random_key() -> str:
    return f"{_RANDOM_STATE}{dist.get_rank()}"


def _failure(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()), (error, None))[0]


def _cause(failure: BaseException) -> str:
    """The failure in one line, without torch's traceback."""
    if isinstance(failure, DamagedFile):
        return str(failure)
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"


def checkpoint_facts(
    models: Mapping[Role, PreTrainedConfig], *, progress: Mapping[Role, Progress] | None, config: TrainerConfig, num_ranks: int
) -> CheckpointFacts:
    """Facts to store in a checkpoint, or to compare with its own, whose progress may be any. models: of the trained networks."""
    roles: dict[Role, RoleFacts] = {}
    for role, lora in {Role.POLICY: config.lora, Role.CRITIC: config.critic_lora}.items():
        if role not in models:
            continue
        model = models[role]
        assert model.architectures, "the model was loaded by its architecture"
        more = _MORE | ({"init"} if lora is not None and lora.is_pissa else set())
        version, schedule_start = (0, 0) if progress is None else progress[role]
        roles[role] = RoleFacts(
            version,
            schedule_start,
            model.architectures[0],
            lora_rank=None if lora is None else lora.rank,
            lora_alpha=None if lora is None else lora.alpha,
            lora_use_rslora=lora is not None and lora.use_rslora,
            lora_more={} if lora is None else lora.unfused.model_dump(mode="json", include=more, exclude_defaults=True),
            model=computing_settings(model),
        )
    return CheckpointFacts(num_ranks, roles, config.optimizer_8bit)


def computing_settings(model: PreTrainedConfig) -> dict[str, Any]:
    """Values of config.json on which results depend, as JSON; transformers has filled in the defaults."""
    assert model.architectures
    keys = computing_keys(find_family(model.architectures[0]))
    return json.loads(json.dumps({key: value for key, value in model.to_dict().items() if key in keys}))
