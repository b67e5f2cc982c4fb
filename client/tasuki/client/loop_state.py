"""State of a training loop beyond the trainer's: the step and the position in the data. A small JSON file in each checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tasuki.client.durable import write_durably
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import read_regular
from tasuki.wire.sealed_json import is_intact, sealed

LOOP_FILE = "loop.json"
_PENDING_FILE = "pending.json"
_MAX_BYTES = 1 << 24
_NAME = re.compile(r"version-(?P<version>\d+)(-step-(?P<step>\d+))?")


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of a loop at a saved checkpoint."""

    step: Step
    """The last step in the checkpoint."""
    position: Mapping[str, int]
    """Position in the dataset after that step."""


def write_loop_state(checkpoint: Path | str, state: LoopState) -> None:
    """Writes the state last: a checkpoint without it is incomplete."""
    write_durably(Path(checkpoint) / LOOP_FILE, sealed(asdict(state)) + "\n")


def write_pending(output_dir: Path, step: Step) -> None:
    """Records a step whose updates are about to begin, in case the client dies before it writes the step's line."""
    write_durably(output_dir / _PENDING_FILE, json.dumps(asdict(step)) + "\n")


def read_pending(output_dir: Path) -> Step | None:
    """Returns the last step whose updates began; None without one or if the file is unreadable."""
    try:
        return Step.of(json.loads(read_regular(output_dir / _PENDING_FILE, max_bytes=_MAX_BYTES)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def read_loop_state(checkpoint: Path) -> LoopState:
    """Raises PathPermissionDenied, and InvalidArgument naming the file if it is damaged."""
    path = checkpoint / LOOP_FILE
    try:
        with named_if_denied(path):
            fields = json.loads(read_regular(path, max_bytes=_MAX_BYTES))
        if not is_intact(fields):
            raise ValueError("its checksum differs from the one in it")
        return LoopState(Step.of(fields["step"]), {name: int(value) for name, value in fields["position"].items()})
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


def save_checkpoint(step: Step, client: Client, position: Mapping[str, int], *, output_dir: Path) -> None:
    """Saves a checkpoint, unless the step learned nothing and its policy version already has one."""
    path = checkpoint_path(output_dir / "checkpoints", step)
    if path is None:
        return
    step.acquire(client, Phase.TRAIN)
    with step.timed("save"):
        saved = client.save(path)
    write_loop_state(saved.path, LoopState(step, position))


def checkpoint_path(folder: Path, step: Step) -> Path | None:
    """Path of the checkpoint after `step`; None if it learned nothing and its policy version already has a checkpoint.

    Named by version, plus the step if an earlier checkpoint has the same version: then only the critic has learned since.
    """
    path = folder / f"version-{step.next_version():06d}"
    if not path.exists():
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
