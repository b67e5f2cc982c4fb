"""State of a training loop beyond the trainer's: the step and the position in the data. A small JSON file in each checkpoint."""

import json
import re
import uuid
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tasuki.client import encode
from tasuki.client.durable import write_durably
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase, TrainingSample
from tasuki.v1.trainer_pb2 import TrainingSamples
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.images import restore
from tasuki.wire.regular_file import read_regular
from tasuki.wire.sealed_json import is_intact, sealed

LOOP_FILE = "loop.json"
_PENDING_FILE = "pending.json"
_MAX_BYTES = 1 << 30
_NAME = re.compile(r"version-(?P<version>\d+)(-step-(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of a loop at a saved checkpoint."""

    step: Step
    """The last step in the checkpoint."""
    position: Mapping[str, int]
    """Position in the dataset after that step."""
    carried: Sequence[Mapping[str, Any]] = ()
    """Groups that the step left unfinished, as JSON; see `tasuki.client.carry`."""


@dataclass(slots=True)
class PendingStep:
    """A step whose updates have begun, with what a client needs to repeat its calls. The trainer answers those that were made before."""

    step: Step
    samples: Sequence[TrainingSample] = ()
    """Samples of the updates, in order; empty if they come from the dataset."""
    log_probs_of: Sequence[int] = ()
    """Positions in the policy's first update whose log-probs are asked for."""
    schedule_steps: int | None = None
    measured: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the updates that need not be repeated."""
    is_updated: bool = False
    """Whether no update is left, only the checkpoint."""
    carried: Sequence[Mapping[str, Any]] = ()
    """Groups that the step left unfinished, as LoopState's."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Start of the calls' ids."""


def write_loop_state(checkpoint: Path | str, state: LoopState) -> None:
    """Writes the state last: a checkpoint without it is incomplete."""
    write_durably(Path(checkpoint) / LOOP_FILE, sealed(asdict(state)) + "\n")


def write_pending(output_dir: Path, pending: PendingStep) -> None:
    """Records a step before its first update and, done, before its checkpoint: a client that dies meanwhile can be resumed there."""
    fields = {name: getattr(pending, name) for name in PendingStep.__slots__} | {"step": asdict(pending.step)}
    chunks = encode.training_chunks(pending.samples) if pending.samples else ()
    fields["samples"] = [b64encode(chunk.SerializeToString()).decode() for chunk in chunks]
    write_durably(output_dir / _PENDING_FILE, json.dumps(fields) + "\n")


def read_pending(output_dir: Path) -> PendingStep | None:
    """Returns the last step whose updates began; None without one. Raises InvalidArgument if the file is damaged."""
    path = output_dir / _PENDING_FILE
    try:
        fields = json.loads(read_regular(path))
        chunks = [TrainingSamples.FromString(b64decode(chunk)) for chunk in fields["samples"]]
        sent = [sample for chunk in chunks for sample in chunk.samples]
        restore(sent)
        samples = list(map(encode.training_sample_from_proto, sent))
        return PendingStep(**fields | {"step": Step.of(fields["step"]), "samples": samples})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, DecodeError) as error:
        text = f"{path} is damaged ({type(error).__name__}: {error}); stop the node and resume from a checkpoint"
        raise InvalidArgument("output_dir", text) from error


def forget_pending(output_dir: Path) -> None:
    """Removes the record of a step that will be made from its beginning."""
    (output_dir / _PENDING_FILE).unlink(missing_ok=True)


def read_loop_state(checkpoint: Path) -> LoopState:
    """Raises PathPermissionDenied, and InvalidArgument naming the file if it is damaged."""
    path = checkpoint / LOOP_FILE
    try:
        with named_if_denied(path):
            fields = json.loads(read_regular(path, max_bytes=_MAX_BYTES))
        if not is_intact(fields):
            raise ValueError("its checksum differs from the one in it")
        position = {name: int(value) for name, value in fields["position"].items()}
        return LoopState(Step.of(fields["step"]), position, tuple(fields.get("carried", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged_checkpoint(checkpoint, f"{path} is damaged ({type(error).__name__}: {error})") from error


def damaged_checkpoint(checkpoint: Path, problem: str) -> InvalidArgument:
    """Error for a checkpoint that cannot be resumed. Names the one before it."""
    complete = complete_checkpoints(checkpoint.parent)
    before = complete[: complete.index(checkpoint)] if checkpoint in complete else complete
    follows = f"to resume from {before[-1]}" if before else "to restart the run at step 0: no complete checkpoint precedes it"
    return InvalidArgument("checkpoint", f"{problem}; remove {checkpoint} {follows}")


def is_save_due(step: Step, save_every: int | None) -> bool:
    return save_every is not None and (step.step + 1) % save_every == 0


def note_updated(output_dir: Path, pending: PendingStep) -> None:
    """Records that only the step's checkpoint may be left to do."""
    pending.samples, pending.is_updated = (), True
    write_pending(output_dir, pending)


def save_checkpoint(pending: PendingStep, client: Client, position: Mapping[str, int], *, output_dir: Path) -> None:
    """Saves a checkpoint, unless the step learned nothing and its policy version already has one."""
    step = pending.step
    path = checkpoint_path(output_dir / "checkpoints", step)
    if path is None:
        return
    step.acquire(client, Phase.TRAIN)
    note_updated(output_dir, pending)
    with step.timed("save"):
        saved = client.save(path, request_id=f"{pending.request_id}-save")
    write_loop_state(saved.path, LoopState(step, position, pending.carried))


def checkpoint_path(folder: Path, step: Step) -> Path | None:
    """Path of the checkpoint after `step`; None if it learned nothing and its policy version already has a checkpoint.

    Named by version, plus the step if an earlier checkpoint has the same version: then only the critic has learned since.
    """
    path = folder / f"version-{step.next_version():06d}"
    if not (path / LOOP_FILE).exists():
        return path
    return path.with_name(f"{path.name}-step-{step.step:06d}") if step.num_policy_steps or step.num_critic_steps else None


def checkpoint_order(path: Path) -> tuple[int, int] | None:
    """Sort key of a run's checkpoints, oldest first; None for any other folder."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else (int(found["version"]), -1 if found["step"] is None else int(found["step"]))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    complete = [path.parent for path in folder.glob(f"version-*/{LOOP_FILE}")]
    ordered = [(order, path) for path in complete if (order := checkpoint_order(path)) is not None]
    return [path for _, path in sorted(ordered)]


def newest_checkpoint(folder: Path) -> tuple[Path, LoopState] | None:
    """The latest complete checkpoint, or None. Raises as read_loop_state for that one; older ones are not checked."""
    complete = complete_checkpoints(folder)
    return (complete[-1], read_loop_state(complete[-1])) if complete else None
