"""What a learner asks of a backend: networks over ranks, their memory, their optimizers and their files. FSDP2 is the one we ship.

Every rank makes the same calls in the same order. A backend knows models, meshes and shards; roles, losses and versions are the learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tasuki.algorithms.batch import Metric
from tasuki.memory.tags import DeviceUsage, MemoryTag, TagUsage
from tasuki.trainer.data.micro_batch import SequencePart, TokenBatch
from tasuki.trainer.roles import Role
from tasuki.transport.export import WeightExport


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """What a checkpoint keeps of a learner beside tensors."""

    versions: Mapping[Role, int]
    """Optimizer steps behind each role's weights."""
    schedule_starts: Mapping[Role, int] = field(default_factory=dict)
    """Version at which each role's schedule begins."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights that rollout can map."""

    export: WeightExport
    num_bytes: int
    """Of this rank."""


class Memory(Protocol):
    """What a rank holds by tag."""

    def pause(self, tags: Sequence[MemoryTag], *, makes_room: bool = False) -> int:
        """Gives pages back, of tags that stay only when it makes room. Returns the bytes."""
        ...

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Takes pages at the same addresses. Returns the bytes. Raises OutOfGpuMemory with every tag asleep as before."""
        ...

    def usage(self) -> list[TagUsage]: ...
    def device_usage(self) -> DeviceUsage: ...


class Backend(Protocol):
    """One rank of every network of a node."""

    @property
    def device(self) -> torch.device: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def sequence_part(self) -> SequencePart:
        """Of each micro-batch, the tokens that this rank is given. All ranks that share one give the same scores."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...

    def num_parameters(self, role: Role) -> int:
        """Of the whole network, over all ranks."""
        ...

    def score_tokens(self, role: Role, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] with gradient and entropies [N], float32, of the policy or the reference."""
        ...

    def score_values(self, batch: TokenBatch) -> Tensor:
        """The critic's values [N], float32, with gradient."""
        ...

    def backward(self, role: Role, loss: Tensor) -> None:
        """Adds the gradients of `loss`, summed over ranks."""
        ...

    def routing_metrics(self, role: Role) -> Mapping[str, Metric]:
        """Of the role's experts, in the passes with gradient since the last call; alike on every rank. None without experts."""
        ...

    def end_scoring(self, role: Role) -> None:
        """Gives back what forward passes without backward have gathered."""
        ...

    def check_alike(self, numbers: Mapping[str, float]) -> None:
        """Raises VersionOrder, on every node of a fleet, for a number that is not the same on all of them."""
        ...

    def clip_gradients(self, role: Role) -> float:
        """Sums the gradients over the nodes of a fleet and scales them down to the role's max_grad_norm. Returns their L2 norm over all
        ranks before. Raises PeerUnavailable when a node is lost."""
        ...

    def step_optimizer(self, role: Role, *, learning_rate: float) -> None: ...
    def clear_gradients(self, role: Role) -> None: ...
    def reset_optimizer(self, role: Role) -> None:
        """Optimizer state as before the first step."""
        ...

    def publish(self, *, policy_version: int) -> Publication:
        """Has the policy's weights where rollout can map them. Raises OutOfGpuMemory."""
        ...

    def withdraw(self) -> None: ...
    def damage_published(self) -> None:
        """A fault that a test of recovery asked for."""
        ...

    def save_checkpoint(self, path: Path, *, facts: LearnerFacts) -> int:
        """Writes everything that training needs. Returns the bytes. Raises PathExists, DiskFull, InvalidArgument."""
        ...

    def write_checkpoint(self, path: Path, save_id: str, *, facts: LearnerFacts) -> int:
        """The same, beside `path`, for `durable.saves.publish`. Returns 0 where another node writes to the same folder."""
        ...

    def check_checkpoint(self, path: Path, *, have: LearnerFacts) -> LearnerFacts:
        """What load_checkpoint would give. Raises what can be seen without reading tensors."""
        ...

    def load_checkpoint(self, path: Path, *, have: LearnerFacts, progressed: Callable[[], None]) -> LearnerFacts:
        """All or nothing. progressed: called while it reads. Raises PathNotFound, InvalidArgument, VersionOrder."""
        ...

    def export_model(self, path: Path) -> int:
        """Writes the policy as a Hugging Face folder. Returns the bytes. Raises PathExists, DiskFull, InvalidArgument."""
        ...

    def close(self) -> None: ...
