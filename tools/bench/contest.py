"""Contest of sync_peers.py: running engines, their trainer, and every way to bring weights from the trainer to the engines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tasuki.v1 import weights_pb2
from tests.ports import free_port
from tools.bench.cases import Case
from tools.bench.sync_ranks import Ranks, published_weights
from tools.bench.sync_report import OURS
from tools.bench.sync_shapes import write_config

IN_PLACE = "NCCL all-gather in place, no engine"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one sync. num_handles: descriptors or IPC handles that ranks must open. host_ms: time spent copying on the host."""

    num_rpcs: int
    num_handles: int
    host_ms: float = 0.0


Way = Callable[[weights_pb2.PublishedWeights], Cost]


class Contest:
    """Engines, their trainer, and every way to bring weights from one to the others."""

    def __init__(self, case: Case, *, folder: Path) -> None:
        self._num_ranks, self._num_engines, self._version = case.num_ranks, case.num_engines, -1
        model_path = str(write_config(case.model, folder / "model"))
        self._engines = _fronts(case, model_path, folder)
        # Measured before the trainer takes memory.
        self._engines.ask("ready")
        common = [str(case.num_ranks), case.model, str(folder), str(free_port())]
        self._trainers = Ranks("tools.bench.peer_trainer", [[str(rank), *common] for rank in range(case.num_ranks)])
        self._handles: Sequence[weights_pb2.WeightHandle] = ()
        self.copied_bytes = 0
        """Bytes copied, over all ranks."""
        self.publish_ms: list[float] = []

    def ways(self) -> dict[str, Way]:
        """Returns every way to sync, ours first: the others are compared with what ours has mapped and recorded."""
        ways: dict[str, Way] = {
            OURS: self.ours,
            "flattened bucket 128 MB": partial(self.buckets, 128 * MIB),
            "flattened bucket 512 MB": partial(self.buckets, 512 * MIB),
            "flattened bucket 2 GB": partial(self.buckets, 2048 * MIB),
            "512 MB, overlapped": partial(self.overlapped, 512 * MIB),
            "2 GB, overlapped": partial(self.overlapped, 2048 * MIB),
            "per tensor": self.tensors,
        }
        return ways | ({IN_PLACE: self.in_place} if self._num_ranks > 1 else {})

    def emptying_ways(self) -> dict[str, Way]:
        """Ways after which the trainer's processes return the memory that torch has cached."""
        return {f"checkpoint-engine {gib} GB": partial(self.checkpoint_engine, gib) for gib in (2, 8)}

    def ours(self, weights: weights_pb2.PublishedWeights) -> Cost:
        reports = self._engines.ask(f"ours {weights.SerializeToString().hex()}")
        self.copied_bytes = sum(report["copied_bytes"] for report in reports)
        # A rank opens the handles of every trainer rank unless it already holds them.
        is_new = list(weights.handles) != list(self._handles)
        self._handles = list(weights.handles)
        return Cost(num_rpcs=self._num_engines, num_handles=is_new * self._num_ranks**2)

    def buckets(self, num_bytes: int, _: weights_pb2.PublishedWeights) -> Cost:
        index, num_buckets, num_handles = 0, 1, 0
        while index < num_buckets:
            answers = self._trainers.ask(f"bucket {num_bytes} {index}")
            index, num_buckets = index + 1, answers[0]["num_buckets"]
            num_handles += self._update(answers, is_last=index == num_buckets, load_format="flattened_bucket")
        return Cost(num_rpcs=num_buckets * self._num_engines, num_handles=num_handles)

    def overlapped(self, num_bytes: int, _: weights_pb2.PublishedWeights) -> Cost:
        index, num_buckets, num_handles = 0, 1, 0
        self._trainers.tell(f"bucket {num_bytes} 0")
        while index < num_buckets:
            answers = self._trainers.hear()
            index, num_buckets = index + 1, answers[0]["num_buckets"]
            if index < num_buckets:
                self._trainers.tell(f"bucket {num_bytes} {index}")
            num_handles += self._update(answers, is_last=index == num_buckets, load_format="flattened_bucket")
        return Cost(num_rpcs=num_buckets * self._num_engines, num_handles=num_handles)

    def tensors(self, _: weights_pb2.PublishedWeights) -> Cost:
        num_handles = self._update(self._trainers.ask("tensors"), is_last=True, load_format=None)
        return Cost(num_rpcs=self._num_engines, num_handles=num_handles)

    def in_place(self, _: weights_pb2.PublishedWeights) -> Cost:
        self._trainers.ask("in_place")
        return Cost(num_rpcs=0, num_handles=0)

    def checkpoint_engine(self, bucket_gib: int, _: weights_pb2.PublishedWeights) -> Cost:
        self._trainers.tell(f"checkpoint_engine {bucket_gib}")
        ready = self._trainers.hear()
        request = {"socket_paths": ready[0]["socket_paths"], "version": str(self._version)}
        self._engines.ask("update_from_ipc " + json.dumps(request))
        self._trainers.hear()
        # Every rank opens its own trainer rank's buffer.
        return Cost(num_rpcs=self._num_engines, num_handles=self._num_ranks, host_ms=max(one["host_ms"] for one in ready))

    def prepare(self, way: str) -> None:
        """Prepares a round outside the timed part."""
        self._trainers.ask("forget_sent")
        if way == IN_PLACE:
            self._trainers.ask("make_places")

    def change(self) -> weights_pb2.PublishedWeights:
        """Changes the weights and publishes them."""
        self._version += 1
        answers = self._trainers.ask(f"change {self._version}")
        self.publish_ms.append(max(one["publish_ms"] for one in answers))
        self.gpu, self.gpu_uuids = answers[0]["gpu"], [one["uuid"] for one in answers]
        return published_weights(answers, self._version)

    def check(self, way: str, weights: weights_pb2.PublishedWeights) -> None:
        """Raises unless every engine serves the version that the way has just sent."""
        if way == IN_PLACE:
            assert all(one["is_equal"] for one in self._trainers.ask("check_places"))
        elif way != OURS:
            self._engines.ask("command hold")
            self.ours(weights)
            self._engines.ask("command release")

    def trim(self) -> None:
        self._trainers.ask("trim")
        self._engines.ask("command trim")

    def floors(self) -> dict[str, list[dict[str, float]]]:
        """Returns every rank's measurements of the links, by name."""
        ranks = [rank for engine in self._engines.ask("floors") for rank in engine["ranks"]]
        return {name: [rank[name] for rank in ranks] for name in ranks[0]}

    def close(self) -> None:
        self._trainers.close()
        self._engines.close()

    def _update(self, answers: Sequence[dict[str, Any]], *, is_last: bool, load_format: str | None) -> int:
        payloads = [one["payload"] for one in answers]
        version = str(self._version) if is_last else None
        self._engines.ask("update " + json.dumps({"payloads": payloads, "load_format": load_format, "version": version}))
        return sum(one["num_handles"] for one in answers)


class Fronts(Protocol):
    """Fronts of all engines; `ask` returns one answer per engine."""

    def ask(self, line: str) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class FrontHere:
    """Front of a single engine, in this process, so that the timed part includes no pipe."""

    def __init__(self, *arguments: str) -> None:
        from tools.bench.peer_front import PeerFront

        self._front = PeerFront.of(*arguments)

    def ask(self, line: str) -> list[dict[str, Any]]:
        return [self._front.run(line)]

    def close(self) -> None:
        """Does nothing: the engine ends with this process."""


def _fronts(case: Case, model_path: str, folder: Path) -> Fronts:
    """Starts the only engine's front in this process, or one process per engine; pipes cost every way a fraction of a millisecond per
    message."""
    commands = [[str(index), str(case.tp_size), model_path, str(folder)] for index in range(case.num_engines)]
    return Ranks("tools.bench.peer_front", commands) if len(commands) > 1 else FrontHere(*commands[0])
