"""Additions of sync_peers.py to every SGLang rank: waiting for the copies of the last call, and benchmark commands."""

import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.tp_worker import BaseTpWorker
from sglang.srt.utils import MultiprocessingSerializer

from tasuki.rollout.rank import EngineRank
from tasuki.rollout.sglang import scheduler
from tools.bench.floors import Floors

BENCH_LOADER = "tools.bench.peer_engine.run_command"
"""Name under which SGLang finds `run_command`."""
SOCKET_DIR = "PEER_SOCKET_DIR"
"""Environment variable with the folder of our front's socket."""


def run_scheduler(*arguments: Any) -> None:
    """The service's scheduler, but a call with a version is answered once its copies are done; SGLang answers earlier."""
    update = BaseTpWorker.update_weights_from_tensor

    def update_and_wait(self: BaseTpWorker, request: Any) -> Any:
        result = update(self, request)
        if request.weight_version is not None:
            torch.cuda.synchronize()
        return result

    BaseTpWorker.update_weights_from_tensor = update_and_wait  # pyright: ignore[reportAttributeAccessIssue]
    scheduler.EngineRank = _ServingRank
    scheduler.run_scheduler(*arguments)


class _ServingRank(EngineRank):
    """Takes our front's commands, too."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        _ranks[:] = [self]
        self.serve(Path(os.environ[SOCKET_DIR]))


_ranks: list[EngineRank] = []


def command_payload(command: str) -> bytes:
    payload = MultiprocessingSerializer.serialize([(command, torch.empty(0, dtype=torch.uint8))])
    assert isinstance(payload, bytes)
    return payload


class _NoCopies:
    """Replaces summed copies: copies nothing and sums the current parameters."""

    def __init__(self, prepared: Any) -> None:
        self._checksums = prepared.recorded.checksums

    def start(self) -> None: ...

    def sums(self) -> np.ndarray:
        self._checksums.start()
        return self._checksums.sums()


_held: list[Any] = []


def run_command(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """hold: later syncs only read back and compare, without a copy; release: they copy again; trim; floors FOLDER."""
    ((content, _),) = named_tensors
    command, *arguments = content.split()
    (rank,) = _ranks
    prepared: Any = rank.receiver._prepared
    match command:
        case "hold":
            _held.append(prepared._copies)
            prepared._copies = _NoCopies(prepared)
        case "release":
            prepared._copies = _held.pop()
        case "trim":
            gc.collect()
            torch.cuda.empty_cache()
        case "floors":
            device = torch.device("cuda", torch.cuda.current_device())
            floors = Floors(rank.receiver, device)
            names = ["within", "across"] if len(floors._arenas) > 1 else ["within"]
            measured = {name: getattr(floors, name)() for name in names}
            Path(arguments[0], f"floors-{rank.rank}.json").write_text(json.dumps(measured))
        case other:
            raise AssertionError(f"no command {other}")
