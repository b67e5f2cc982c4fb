"""What the planner chose for a node: written to plan.json when the node starts, and read by its services."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from tasuki.config.load import write_private
from tasuki.config.table import Schema
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_regular

TrainerMemory = Literal["weights", "gradients", "optimizer", "export", "cache"]
EngineMemory = Literal["weights", "kv_cache"]
_MAX_BYTES = 1_000_000


class Choices(Schema):
    micro_batch_tokens: PositiveInt
    checkpointing: Literal["none", "attention", "full", "offloaded"]
    kept_layers: NonNegativeInt = 0
    """Number of last layers that keep everything, whatever `checkpointing` says."""
    shares_base: bool = False
    """Whether trainer and engine read one copy of the model below the adapters."""
    merges_in_place: bool = False
    """Whether adapters are merged into the base's own memory for the engine, from LOAD_WEIGHTS to OFFLOAD."""
    trainer: tuple[tuple[TrainerMemory, ...], ...] = ()
    """Memory that stays during rollout, for each rank. "export" is what the engine reads; "cache" is cached by torch. Missing ranks keep
    nothing."""
    rollout: tuple[tuple[EngineMemory, ...], ...] = ()
    """Memory that stays during training, for each engine rank, ordered by replica. CUDA graphs follow "kv_cache"."""
    kv_tokens: PositiveInt | None = None
    """Tokens in a replica's KV cache; None lets the engine size it by the free memory at its start."""
    starts_together: bool = False
    """Whether trainer and engine start at once, because every GPU has room for both."""
    later_bytes: NonNegativeInt = 0
    """Most GPU memory that stages after LOAD_WEIGHTS take beside a trainer rank. Where less is free, the rank returns what torch caches."""

    def of_trainer(self, rank: int) -> frozenset[str]:
        """Memory that stays on one trainer rank."""
        return frozenset(self.trainer[rank]) if rank < len(self.trainer) else frozenset()

    def of_rollout(self, rank: int) -> frozenset[str]:
        """Memory that stays on one engine rank, numbered over all replicas."""
        return frozenset(self.rollout[rank]) if rank < len(self.rollout) else frozenset()


def plan_path(folder: Path) -> Path:
    """Choices of the node that runs, or last ran, in a state folder; in an archive those of its run."""
    return folder / "plan.json"


def write_choices(choices: Choices, state_dir: Path) -> None:
    write_private(plan_path(state_dir), choices.model_dump_json(indent=2) + "\n")


def read_choices(state_dir: Path) -> Choices:
    """Raises PathNotFound if no node was started in the folder, PathPermissionDenied, and InvalidArgument for another file."""
    path = plan_path(state_dir)
    with named_if_denied(path, key="state_dir"):
        if not path.is_file():
            raise PathNotFound(f"state_dir: {path} does not exist; start the node with `tasuki up`", path=path)
        try:
            return Choices.model_validate_json(read_regular(path, max_bytes=_MAX_BYTES))
        except ValueError as error:
            raise InvalidArgument("state_dir", f"{path} holds no plan of this version; start the node again") from error
