"""The interface of a trainer backend: sharded networks, their memory, optimizers and files. FSDP2, and megatron-core.

All ranks make the same calls in the same order. A backend handles models, meshes and shards; roles, losses and versions are the learner's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tasuki.algorithms.batch import Metric
from tasuki.trainer.data.micro_batch import SequencePart, TokenBatch
from tasuki.trainer.memory import Publication, TrainerMemory
from tasuki.trainer.wire import Role


class Progress(NamedTuple):
    """What a checkpoint says of a role, besides tensors."""

    version: int
    """Number of optimizer steps in its weights."""
    schedule_start: int
    """Version at which its schedule starts."""


class Backend(Protocol):
    """One rank's part of every network of a node."""

    @property
    def device(self) -> torch.device: ...
    @property
    def memory(self) -> TrainerMemory: ...
    @property
    def publication(self) -> Publication:
        """The policy's weights for rollout."""
        ...

    @property
    def num_ranks(self) -> int: ...
    @property
    def sequence_part(self) -> SequencePart:
        """The part of each micro-batch's tokens assigned to this rank. Ranks that share a micro-batch return the same scores."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """Whether samples of a micro-batch may share the computation of their prompt."""
        ...

    def num_parameters(self, role: Role) -> int:
        """Parameters of the whole network, over all ranks."""
        ...

    def score_tokens(self, role: Role, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Computes log-probs [N] with gradient and entropies [N], float32, of the policy or the reference."""
        ...

    def score_values(self, batch: TokenBatch) -> Tensor:
        """Computes the critic's values [N], float32, with gradient."""
        ...

    def backward(self, role: Role, loss: Tensor, *, share: float) -> None:
        """Accumulates the gradients of `loss`, and of routers' auxiliary loss, summed over ranks. share: see MicroBatch."""
        ...

    def routing_metrics(self, role: Role) -> Mapping[str, Metric]:
        """Metrics of the role's experts, over passes with gradient since the last call; equal on every rank. Empty without experts."""
        ...

    def release_gathered(self, role: Role) -> None:
        """Releases what forward passes without backward have gathered: after scoring, or when backward failed."""
        ...

    def check_alike(self, numbers: Mapping[str, float]) -> None:
        """Raises VersionOrder on every node of a fleet if a number differs between nodes."""
        ...

    def clip_gradients(self, role: Role) -> float:
        """Sums the gradients over a fleet's nodes and scales them down to the role's max_grad_norm. Returns their L2 norm before scaling,
        over all ranks. Raises PeerUnavailable if a node is lost."""
        ...

    def step_optimizer(self, role: Role, *, learning_rate: float) -> None: ...
    def clear_gradients(self, role: Role) -> None: ...
    def reset_optimizer(self, role: Role) -> None:
        """Resets optimizer state to that before the first step."""
        ...

    def save_checkpoint(self, path: Path, *, progress: Mapping[Role, Progress], save_id: str | None = None) -> int:
        """Writes everything needed to continue training. Returns the bytes. Raises PathExists, DiskFull, InvalidArgument.

        save_id: of a save of several nodes. Writes beside `path`, for `durable.saves.publish`; returns 0 if another node writes to the
        same folder.
        """
        ...

    def check_checkpoint(self, path: Path) -> Mapping[Role, Progress]:
        """What load_checkpoint would return. Raises every error visible without reading tensors."""
        ...

    def load_checkpoint(self, path: Path, *, progressed: Callable[[], None]) -> Mapping[Role, Progress]:
        """Loads a checkpoint, all or nothing. progressed: called while reading. Raises PathNotFound, InvalidArgument."""
        ...

    def export_model(self, path: Path) -> int:
        """Writes the policy as a Hugging Face folder. Returns the bytes. Raises PathExists, DiskFull, InvalidArgument."""
        ...

    def close(self) -> None: ...
