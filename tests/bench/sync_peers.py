"""Our sync and its peers into running SGLang engines: `python -m tests.bench.sync_peers [--cases 7b:1:1 7b:4:4 7b:4:1x4] [--out FOLDER]`.

A case is model : trainer ranks : tensor-parallel ranks x engines, with one trainer rank and one engine rank on every GPU, each in a process
of its own; several engines have a front each. The peers are SGLang's `update_weights_from_tensor` with flattened buckets
and with single tensors, gathered by FSDP2's `full_tensor` and sent as CUDA IPC handles as verl and slime do; "overlapped" gathers the next
bucket while the engines load one, which they do not. NCCL's all-gather straight into place has no engine at all. All take turns, each with
new weights, 20 rounds after the first. The clock runs from the call until every rank has waited for its copies; ours also compares the
sums that the copies make of what they wrote (all is read back at its first sync alone). After each round of a peer, off the clock, the
engines' weights are compared with what was published by our checksums: no peer's figure is of weights that did not arrive. Peers keep their
memory from round to round on the clock; what they take at most is measured in rounds of their own, from a trimmed state. Publishing, which
copies our trainer's weights into its arena and sums them up, is off the clock and told apart; all weights are bfloat16 from the start. CPU
seconds are of all processes, SGLang's waiting schedulers included. Writes sync_peers.json, sync_peers.md and sync_peers.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from tasuki.v1 import weights_pb2
from tests.bench.cases import METAVAR, Case
from tests.bench.gpus import require_gpus
from tests.bench.peak_memory import PeakMemory
from tests.bench.sync_gpu import NUM_ROUNDS, floor_ms
from tests.bench.sync_ranks import REPOSITORY, Ranks, published_weights
from tests.bench.sync_report import OURS, write_report
from tests.bench.sync_shapes import QWEN, write_config

NUM_MEMORY_ROUNDS = 3
IN_PLACE = "NCCL all-gather in place, no engine"
MIB = 1 << 20
# Gathered whole on every GPU, beside an engine and a trainer.
MOST_WHOLE_BYTES = 40 << 30
CASE_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one sync. num_handles: descriptors or IPC handles that ranks were given to open."""

    num_rpcs: int
    num_handles: int


@dataclass(frozen=True, slots=True)
class Round:
    total_ms: float
    cpu_ms: float
    num_rpcs: int
    num_handles: int


class Contest:
    """Engines, their trainer, and every way to bring weights from one to the others."""

    def __init__(self, case: Case, *, folder: Path) -> None:
        self._num_ranks, self._num_engines, self._version = case.num_ranks, case.num_engines, -1
        model_path = str(write_config(case.model, folder / "model"))
        self._engines = _fronts(case, model_path, folder)
        # Before the trainer takes memory, which they measure.
        self._engines.ask("ready")
        self._trainers = Ranks(
            "tests.bench.peer_trainer", [[str(r), str(case.num_ranks), case.model, str(folder)] for r in range(case.num_ranks)]
        )
        self._handles: Sequence[weights_pb2.WeightHandle] = ()
        self._model_bytes = sum(2 * math.prod(shape) for shape in QWEN[case.model].checkpoint().values())
        self.copied_bytes = 0
        """By all ranks."""
        self.publish_ms: list[float] = []

    def ways(self) -> dict[str, Callable[[weights_pb2.PublishedWeights], Cost]]:
        """Ours first: the comparison of the others uses what it has mapped and recorded."""
        ways: dict[str, Callable[[weights_pb2.PublishedWeights], Cost]] = {
            OURS: self.ours,
            "flattened bucket 128 MB": partial(self.buckets, 128 * MIB),
            "flattened bucket 512 MB": partial(self.buckets, 512 * MIB),
            "flattened bucket 2 GB": partial(self.buckets, 2048 * MIB),
            "512 MB, overlapped": partial(self.overlapped, 512 * MIB),
        }
        if self._num_ranks == 1 or self._model_bytes <= MOST_WHOLE_BYTES:
            ways["per tensor"] = self.tensors
        if self._num_ranks > 1 and self._model_bytes <= MOST_WHOLE_BYTES:
            ways[IN_PLACE] = self.in_place
        return ways

    def ours(self, weights: weights_pb2.PublishedWeights) -> Cost:
        reports = self._engines.ask(f"ours {weights.SerializeToString().hex()}")
        self.copied_bytes = sum(report["copied_bytes"] for report in reports)
        # A rank opens the handles of every trainer rank when they are not those that it has.
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

    def change(self) -> weights_pb2.PublishedWeights:
        """New weights, published."""
        self._version += 1
        answers = self._trainers.ask(f"change {self._version}")
        self.publish_ms.append(max(one["publish_ms"] for one in answers))
        self.gpu, self.gpu_uuids = answers[0]["gpu"], [one["uuid"] for one in answers]
        return published_weights(answers, self._version)

    def check(self, way: str, weights: weights_pb2.PublishedWeights) -> None:
        """Raises unless the version is where the way has just brought it."""
        if way == IN_PLACE:
            assert all(one["is_equal"] for one in self._trainers.ask("check_places"))
        elif way != OURS:
            self._engines.ask("command hold")
            self.ours(weights)
            self._engines.ask("command release")

    def trim(self) -> None:
        self._trainers.ask("drop_places")
        self._engines.ask("command trim")

    def floors(self) -> dict[str, list[dict[str, float]]]:
        """What every rank measures of the links, by name."""
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
    """Of all engines; each answers."""

    def ask(self, line: str) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class FrontHere:
    """The only engine's, in this process: no pipe is on the clock."""

    def __init__(self, *arguments: str) -> None:
        from tests.bench.peer_front import PeerFront

        self._front = PeerFront.of(*arguments)

    def ask(self, line: str) -> list[dict[str, Any]]:
        return [self._front.run(line)]

    def close(self) -> None:
        """It ends with this process."""


def _fronts(case: Case, model_path: str, folder: Path) -> Fronts:
    """Several engines have a process each, which costs a fraction of a millisecond a message for whatever way."""
    commands = [[str(index), str(case.tp_size), model_path, str(folder)] for index in range(case.num_engines)]
    return Ranks("tests.bench.peer_front", commands) if len(commands) > 1 else FrontHere(*commands[0])


def timed_round(contest: Contest, name: str, way: Callable[[weights_pb2.PublishedWeights], Cost]) -> Round:
    weights = contest.change()
    time.sleep(0.1)  # the schedulers are idle
    cpu_s, start = cpu_seconds(), time.perf_counter()
    cost = way(weights)
    total_s = time.perf_counter() - start
    cpu_s = cpu_seconds() - cpu_s
    contest.check(name, weights)
    return Round(total_ms=1e3 * total_s, cpu_ms=1e3 * cpu_s, **asdict(cost))


def memory_round(contest: Contest, name: str, way: Callable[[weights_pb2.PublishedWeights], Cost]) -> int:
    weights = contest.change()
    contest.trim()
    time.sleep(0.1)
    with PeakMemory(contest.gpu_uuids) as memory:
        way(weights)
    contest.check(name, weights)
    return memory.extra_bytes


def cpu_seconds() -> float:
    """Of this process and all below it."""
    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    contest = Contest(case, folder=folder)
    ways = contest.ways()
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, way in ways.items():
            rounds[name].append(timed_round(contest, name, way))
        times = ", ".join(f"{name} {of_way[-1].total_ms:.1f}" for name, of_way in rounds.items())
        print(f"{case} round {number} of {NUM_ROUNDS}, ms: {times}", file=sys.stderr, flush=True)
    extra = {name: max(memory_round(contest, name, way) for _ in range(NUM_MEMORY_ROUNDS)) for name, way in ways.items()}
    contest.trim()
    floors = contest.floors()
    contest.close()
    return {
        "model": case.model,
        "gpu": contest.gpu,
        "num_ranks": case.num_ranks,
        "tp_size": case.tp_size,
        "num_engines": case.num_engines,
        "publish_ms": statistics.median(contest.publish_ms),
        "copied_bytes": contest.copied_bytes,
        "floors": floors,
        "floor_ms": floor_ms({"floors": floors}),
        "ways": {
            name: {"first": asdict(all_rounds[0]), "rounds": list(map(asdict, all_rounds[1:])), "extra_bytes": extra[name]}
            for name, all_rounds in rounds.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [Case("7b", ranks, ranks) for ranks in (1, 2, 4)]
    parser.add_argument("--cases", nargs="+", type=Case.beside_each_other, default=cases, metavar=METAVAR)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/bench")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        text, file = args.case
        result = run_case(Case.beside_each_other(text), Path(tempfile.mkdtemp(prefix="peers-")))
        Path(file).write_text(json.dumps(result))
        os._exit(0)  # an engine of this process ends with it
    require_gpus(max(case.num_gpus for case in args.cases))
    args.out.mkdir(parents=True, exist_ok=True)
    return run_cases(args.cases, args.out)


def run_cases(wanted: Sequence[Case], out: Path) -> int:
    """One process for each case, since an engine's GPUs are free only when it has ended. Returns how many failed."""
    cases: list[dict[str, Any]] = []
    for case in wanted:
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, "-m", "tests.bench.sync_peers", "--case", str(case), file.name]
            with suppress(subprocess.TimeoutExpired):  # then nothing is written, either
                subprocess.run(command, cwd=REPOSITORY, check=False, timeout=CASE_TIMEOUT_S)
            written = Path(file.name).read_text()
        if written:
            cases.append(json.loads(written))
            print(write_report({"gpu": cases[0]["gpu"], "cases": cases}, out), flush=True)
        else:
            print(f"{case} did not finish", file=sys.stderr)
    return len(wanted) - len(cases)


if __name__ == "__main__":
    sys.exit(main())
