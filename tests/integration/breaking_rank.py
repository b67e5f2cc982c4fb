"""An engine rank without an engine: the real receive path with many tensors, in a process that fails between two copies."""

import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasuki.rollout import receive
from tasuki.rollout.rank import EngineRank, rank_allocator
from tasuki.rpc.failpoints import Failpoints
from tasuki.weights.copies import ViewCopy
from tasuki.wire.stages import MemoryTag
from tests.integration.forked import processes
from tests.models import poison

Shapes = Sequence[tuple[str, tuple[int, ...]]]


class Break(StrEnum):
    """Failure of a rank after some copies."""

    KILL = "kill"
    RAISE = "raise"
    SKIP = "skip"
    """Skips the remaining copies without an error."""


@dataclass(frozen=True)
class Breaking:
    how: Break
    after: int
    """Number of copies made before the failure."""


class FlatModel(nn.Module):
    """A model with parameters of these names and shapes, each loaded by a plain copy."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.names = {name.replace(".", "/"): name for name, _ in shapes}
        for name, shape in shapes:
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, loaded in weights:
            # Tensors that the model lacks are skipped, as in SGLang's loaders.
            if (parameter := own.get(name.replace(".", "/"))) is not None:
                parameter.data.copy_(loaded)

    def digest(self) -> str:
        return digest_of({self.names[name]: parameter for name, parameter in self.named_parameters()})


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(name.encode() + tensors[name].detach().contiguous().view(torch.int16).numpy().tobytes())
    return content.hexdigest()


class BreakingCopies:
    """Copies that stop before the last ones. made: the copies that are made."""

    longest = 0

    def __init__(self, made: Any, breaking: Breaking) -> None:
        self._made, self._breaking = made, breaking

    def start(self) -> None:
        self._made.start()
        match self._breaking.how:
            case Break.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Break.RAISE:
                raise RuntimeError(f"broken after {self._breaking.after} copies")
            case Break.SKIP:
                return

    def sums(self) -> Any:
        return self._made.sums()


def break_copies(breaking: Breaking | None) -> None:
    """Makes all later host copies of a sync fail."""
    receive.prepare_copies = partial(_prepared, receive.prepare_copies, breaking)


def _prepared(prepare: Callable[..., Any], breaking: Breaking | None, copies: Sequence[ViewCopy], **settings: Any) -> Any:
    num_copies = sum(copy.source is not None for copy in copies)
    BreakingCopies.longest = max(BreakingCopies.longest, num_copies)
    if breaking is None or not num_copies:
        return prepare(copies, **settings)
    return BreakingCopies(prepare(copies[: breaking.after], **settings), breaking)


def run_rank(
    pipe: Connection, shapes: Shapes, breaking: Breaking | None, socket_dir: Path, rank: int, failpoint: str | None
) -> None:
    torch.set_num_threads(1)
    break_copies(breaking)
    allocator = rank_allocator("cpu")
    with allocator.region(MemoryTag.WEIGHTS):
        model = FlatModel(shapes)
    with allocator.region(MemoryTag.KV_CACHE):
        cache = torch.zeros(1 << 20, dtype=torch.uint8)
    engine_rank = EngineRank(model, allocator, rank=rank)
    poison(model)
    with tempfile.TemporaryDirectory(prefix="tasuki-") as folder:
        if failpoint is not None:
            engine_rank.receiver.failpoints = Failpoints(f"scheduler{rank}", [failpoint], folder=Path(folder))
        engine_rank.serve(socket_dir)
        while True:
            pipe.recv()
            pipe.send((model.digest(), BreakingCopies.longest, cache.nbytes))


class BreakingRank:
    """A rank's process, which takes the commands of a front with its socket in `socket_dir`."""

    def __init__(
        self,
        shapes: Shapes,
        breaking: Breaking | None = None,
        *,
        socket_dir: Path,
        rank: int = 0,
        failpoint: str | None = None,
    ) -> None:
        self._pipe, theirs = processes.Pipe()
        arguments = theirs, shapes, breaking, socket_dir, rank, failpoint
        self._process = processes.Process(target=run_rank, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def holds(self) -> tuple[str, int]:
        """Returns a digest of all parameters, and the number of copies in a sync."""
        self._pipe.send(None)
        digest, num_copies, _ = self._pipe.recv()
        return digest, num_copies

    @property
    def exit_code(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
