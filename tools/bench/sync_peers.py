"""Our sync and its peers into running SGLang engines: `python -m tools.bench.sync_peers [--cases 7b:1:1 7b:4:4 7b:4:1x4] [--out FOLDER]`.

A case is model : trainer ranks : tensor-parallel ranks x engines, with one trainer rank and one engine rank on every GPU, each in a
separate process. Several engines have a front each. The peers:

- SGLang's `update_weights_from_tensor` with flattened buckets and with single tensors. They are gathered by FSDP2's `full_tensor` and sent
  as CUDA IPC handles, as verl and slime do. "overlapped" also gathers the next bucket while the engines load one, which they do not.
- NCCL's all-gather straight into place, without any engine.
- checkpoint-engine, which keeps a copy in host memory and broadcasts it. Its update without making the copy has a separate row.

All take turns, each with new weights, 20 rounds after the first. checkpoint-engine's turns come last, since it frees torch's cached memory.
Time runs from the call until every rank has waited for its copies. Ours includes comparing the checksums that the copies compute while
writing; only its first sync reads everything back. After each round of a peer, untimed, our checksums compare the engines' weights with
those published, so no figure is of weights that did not arrive. In timed rounds peers keep their memory; its peak is measured in separate
rounds that start from a trimmed state. Publishing copies our trainer's weights into its arena and sums them; it is untimed and reported
separately. All weights are bfloat16 from the start. CPU seconds are of all processes, including SGLang's waiting schedulers. Writes
sync_peers.json, sync_peers.md and sync_peers.png.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.bench.cases import METAVAR, Case
from tools.bench.contest import Contest, Way
from tools.bench.floors import floor_ms
from tools.bench.gpus import require_gpus
from tools.bench.peak_memory import PeakMemory
from tools.bench.processes import REPOSITORY, run_to_its_end
from tools.bench.sync_gpu import NUM_ROUNDS
from tools.bench.sync_report import write_report

NUM_MEMORY_ROUNDS = 2
CASE_TIMEOUT_S = 900
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class Round:
    total_ms: float
    cpu_ms: float
    num_rpcs: int
    num_handles: int
    host_ms: float


def timed_round(contest: Contest, name: str, way: Way) -> Round:
    contest.prepare(name)
    weights = contest.change()
    time.sleep(0.1)  # the schedulers are idle
    cpu_s, start = cpu_seconds(), time.perf_counter()
    cost = way(weights)
    total_s = time.perf_counter() - start
    cpu_s = cpu_seconds() - cpu_s
    contest.check(name, weights)
    return Round(total_ms=1e3 * total_s, cpu_ms=1e3 * cpu_s, **asdict(cost))


def memory_round(contest: Contest, name: str, way: Way) -> int:
    weights = contest.change()
    contest.trim()
    time.sleep(0.1)
    with PeakMemory(contest.gpu_uuids) as memory:
        contest.prepare(name)
        way(weights)
    contest.check(name, weights)
    return memory.extra_bytes


def cpu_seconds() -> float:
    """CPU seconds of this process and all its descendants."""
    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    contest = Contest(case, folder=folder)
    rounds = take_turns(case, contest, contest.ways())
    contest.trim()
    rounds |= take_turns(case, contest, contest.emptying_ways())
    ways = contest.ways() | contest.emptying_ways()
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


def take_turns(case: Case, contest: Contest, ways: dict[str, Way]) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, way in ways.items():
            rounds[name].append(timed_round(contest, name, way))
        times = ", ".join(f"{name} {of_way[-1].total_ms:.1f}" for name, of_way in rounds.items())
        print(f"{case} round {number} of {NUM_ROUNDS}, ms: {times}", file=sys.stderr, flush=True)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [Case("7b", ranks, ranks) for ranks in (1, 2, 4)]
    parser.add_argument("--cases", nargs="+", type=Case.beside_each_other, default=cases, metavar=METAVAR)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/bench")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        text, folder = args.case
        result = run_case(Case.beside_each_other(text), Path(folder))
        Path(folder, RESULT).write_text(json.dumps(result))
        os._exit(0)  # an engine of this process ends with it
    require_gpus(max(case.num_gpus for case in args.cases))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the case is cleaned up first
    args.out.mkdir(parents=True, exist_ok=True)
    return run_cases(args.cases, args.out)


def run_cases(wanted: Sequence[Case], out: Path) -> int:
    """Runs each case in a separate process, since an engine frees its GPUs only when it ends. Returns the number of failures."""
    cases: list[dict[str, Any]] = []
    for case in wanted:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            command = [sys.executable, "-m", "tools.bench.sync_peers", "--case", str(case), folder]
            status = run_to_its_end(command, timeout_s=CASE_TIMEOUT_S)
            if status == 0:
                cases.append(json.loads(Path(folder, RESULT).read_text()))
        if status == 0:
            print(write_report({"gpu": cases[0]["gpu"], "cases": cases}, out), flush=True)
        else:
            print(f"{case} did not finish", file=sys.stderr)
    return len(wanted) - len(cases)


if __name__ == "__main__":
    sys.exit(main())
