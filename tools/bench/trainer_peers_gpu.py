"""Training steps beside torchtitan's and TRL's: `PYTHONPATH=FOLDER:$PYTHONPATH python -m tools.bench.trainer_peers_gpu [--ranks 2]
[--preset qwen2.5-3b --ranks 1]`.

FOLDER holds the packages of tools/bench/step-peers-requirements.txt. Qwen2.5's 7B shape, or 3B's on one GPU, which has as many bytes of
state per GPU; random weights, float32 masters, bfloat16 compute, AdamW, clipping, the samples of `trainer_step_gpu`. First the sides try
their settings below, in turn. The fastest of each side then runs again, --turns times. --limit-s bounds the total: tries stop in time for
the turns.

Prints a line of JSON per run, then a table, and writes trainer_peers_gpu.json after each run. --tiny tries it with tiny models on a CPU,
without the settings that need a GPU; use --ranks 1 with it.

Each side learns the second half of every sample: tasuki and TRL by a policy loss with log-probs and entropy, torchtitan by cross-entropy.
torchtitan has tasuki's micro-batches. TRL makes its own, and pads them: `micro_batch_places` counts padding.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tasuki.models.family import Model, full_attention
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.plan import plan_micro_batches
from tests.ports import free_port
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.plan_gpu import make_model_apart, node_for
from tools.bench.trainer_step_gpu import MICRO_BATCH_TOKENS, lengths_of, run_case

Settings = tuple[str, ...]
OURS = "tasuki"
ON_GPUS = ("--liger", "--attention flash_attention_4")
NUM_SAMPLES = {"qwen2.5-7b": 48, "qwen2.5-3b": 24}
TRIES: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen2.5-7b": {
        OURS: ("7b-85gb none", "7b none", "7b-auto none", "7b-host none", "7b-attention none", "7b-kept none"),
        "torchtitan": (
            "--recompute selective --compile",
            "--recompute full --compile",
            "--recompute selective",
            "--recompute full",
        ),
        "trl": (
            "--recompute full --batch 2 --liger",
            "--recompute full --batch 4 --liger",
            "--recompute full --batch 2",
            "--recompute full --batch 2 --liger --attention flash_attention_4",
        ),
    },
    "qwen2.5-3b": {
        OURS: ("3b-kept none", "3b none", "3b-kept blocks", "3b-attention none"),
        "torchtitan": (
            "--recompute selective --compile",
            "--recompute full --compile",
            "--recompute none --compile",
            "--recompute selective --compile --autocast",
            "--recompute full",
        ),
        "trl": (
            "--recompute full --batch 3 --liger",
            "--recompute full --batch 3 --liger --attention flash_attention_4",
            "--recompute none --batch 2 --liger",
            "--recompute full --batch 3",
        ),
    },
}
"""Settings by preset and side: likely winners first, then the one that keeps least. Ours are a case of `trainer_step_gpu` and the value of
trainer.compile. TRL's first setting has about as many positions per micro-batch as ours has tokens.
"""
NUM_SURE = {OURS: 2}
"""Tries per side that run even if time for the turns then runs short; 1 for other sides. Ours: the fastest, and what keeps least."""
_TOLD, _ABORT_S = 3000, 10.0
"""Last characters of a log in an error; seconds for a rank to print its stacks."""
MODULES = {"torchtitan": "tools.bench.titan_step", "trl": "tools.bench.trl_step"}
MULTIPLE, GROUP = 128, 8


def work_of(arguments: Namespace) -> dict[str, Any]:
    """Returns the arguments of a peer's rank."""
    device = "cpu" if arguments.tiny else "cuda"
    shape = node_for(arguments.preset, gpu_bytes=1, device=device, num_ranks=1).model
    lengths = lengths_of(arguments.samples)
    cost = sample_cost(Model(shape=shape, attention=full_attention(shape)))
    plan = plan_micro_batches(lengths, num_ranks=arguments.ranks, max_tokens=arguments.micro_batch_tokens, cost=cost)
    parts = [[[lengths[index] for index in indices] for indices in rank] for rank in plan]
    fullest = max(sum(part) for rank in parts for part in rank)
    return {
        "shape": {name: value for name, value in asdict(shape).items() if isinstance(value, int)},
        "plan": parts,
        "num_places": -(-(fullest + 1) // MULTIPLE) * MULTIPLE,
        "steps": arguments.steps,
    }


def run_peer(side: str, settings: str, folder: Path, arguments: Namespace) -> dict[str, Any]:
    """Runs one process per rank. `error` has the last lines of a rank that fails, and the stacks of one that is too slow."""
    shared = os.environ | {
        "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as in torchtitan's run_train.sh
        "HF_HUB_OFFLINE": "1",  # transformers and TRL would wait for the hub
        "PYTHONFAULTHANDLER": "1",  # prints the stacks on abort
    }
    options = [*settings.split(), *(["--device", "cpu"] if arguments.tiny else [])]
    command = [sys.executable, "-m", MODULES[side], str(folder / "work.json"), str(folder / "model"), *options]
    logs = [folder / f"rank{rank}.log" for rank in range(arguments.ranks)]
    deadline = time.monotonic() + arguments.run_limit_s
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        for rank in ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        ranks[0].send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            ranks[0].wait(_ABORT_S)
        return {"error": f"took more than {arguments.run_limit_s} s: {last_lines(logs[0])}"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    answers = [line for line in logs[0].read_text(errors="replace").splitlines() if line.startswith("RESULT ")]
    return json.loads(answers[-1].removeprefix("RESULT ")) if answers else {"error": last_lines(logs[0])}


def last_lines(log: Path) -> str:
    """Returns the end of a log, without the module list that follows the stacks."""
    return log.read_text(errors="replace").partition("\nExtension modules:")[0][-_TOLD:]


def run_ours(settings: str, folder: Path, arguments: Namespace) -> dict[str, Any]:
    case, compiled = settings.split()
    result = run_case(case, folder / "model", "default", compiled, arguments)
    if "micro_batches" in result:
        result["micro_batch_places"] = result["tokens"] // result["micro_batches"] // arguments.ranks
    return result


def fastest(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the fastest result; None if none ran."""
    ran = [result for result in results if "tokens_per_s" in result]
    return max(ran, key=lambda result: result["tokens_per_s"]) if ran else None


def least(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the result with the lowest peak memory; None if none ran on a GPU."""
    ran = [result for result in results if "allocated_bytes" in result]
    return min(ran, key=lambda result: result["allocated_bytes"]) if ran else None


def taken(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the fastest try of each side that has one."""
    sides = dict.fromkeys(result["side"] for result in results)
    tries = {side: [each for each in results if each["side"] == side and not each["is_turn"]] for side in sides}
    return {side: best for side, of_side in tries.items() if (best := fastest(of_side)) is not None}


def needed_s(results: Sequence[dict[str, Any]], *, turns: int) -> float:
    """Seconds for another try, assumed as long as the longest so far, and for the turns after it."""
    return max((each["run_s"] for each in results), default=0.0) + turns * sum(
        each["run_s"] for each in taken(results).values()
    )


def in_turn(tries: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Returns (side, settings): the first try of every side, then the second of every side, and so on."""
    rounds = zip_longest(*([(side, settings) for settings in of_side] for side, of_side in tries.items()))
    return [each for each in chain.from_iterable(rounds) if each is not None]


def measure(
    tries: Mapping[str, Sequence[str]],
    run: Callable[[str, str], dict[str, Any]],
    keep: Callable[[list[dict[str, Any]]], None],
    *,
    turns: int,
    deadline: float,
) -> list[dict[str, Any]]:
    """Runs the sure tries, as many others as leave time for the turns, then the turns; returns all results.

    run: takes a side and settings. keep: receives all results after each run. deadline: of time.monotonic().
    """
    results: list[dict[str, Any]] = []

    def add(side: str, settings: str, *, is_turn: bool) -> None:
        begun = time.monotonic()
        facts = {"side": side, "settings": settings, "is_turn": is_turn}
        result = facts | run(side, settings)
        results.append(result | {"run_s": round(time.monotonic() - begun, 1)})
        keep(results)

    for side, settings in in_turn(tries):
        is_sure = settings in tries[side][: NUM_SURE.get(side, 1)]
        if time.monotonic() + (0.0 if is_sure else needed_s(results, turns=turns)) <= deadline:
            add(side, settings, is_turn=False)
    for _ in range(turns):
        for side, best in taken(results).items():
            if time.monotonic() + best["run_s"] <= deadline:
                add(side, best["settings"], is_turn=True)
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """Lists for each side: tokens/s per GPU of its fastest settings in every run with peak memory, and those with the lowest peak."""
    best, lines = taken(results), list[str]()
    for side, of_side in best.items():
        runs = [each for each in results if each["side"] == side and each["settings"] == of_side["settings"]]
        rates = [each["tokens_per_s"] for each in runs if "tokens_per_s" in each]
        lines.append(f"{side} [{of_side['settings']}]: {rates} tokens/s a GPU; {memory(of_side)}")
        if (frugal := least([each for each in results if each["side"] == side])) is not None:
            lines.append(f"  least [{frugal['settings']}]: {frugal['tokens_per_s']} tokens/s a GPU; {memory(frugal)}")
        if side != OURS and OURS in best:
            lines.append(f"  tasuki {middle(results, best[OURS]) / middle(results, of_side):.2f} times as fast")
    return "\n".join(lines)


def middle(results: Sequence[dict[str, Any]], best: Mapping[str, Any]) -> float:
    """Median tokens/s of a side's settings, over their try and turns."""
    return statistics.median(
        each["tokens_per_s"]
        for each in results
        if (each["side"], each["settings"]) == (best["side"], best["settings"]) and "tokens_per_s" in each
    )


def memory(result: Mapping[str, Any]) -> str:
    """Formats the peak of torch's allocator, and the driver's count after the steps."""
    if "allocated_bytes" not in result:
        return "no GPU"
    places = result.get("micro_batch_places")
    return f"peak {result['allocated_bytes'] / 1e9:.1f} GB, driver {result['driver_bytes'] / 1e9:.1f} GB, {places} places"


def read_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--preset", choices=TRIES, default="qwen2.5-7b")
    parser.add_argument("--ranks", type=at_least_one, default=2)
    parser.add_argument("--samples", type=at_least_one, help="a multiple of 8 times the ranks, and of TRL's batches")
    parser.add_argument("--steps", type=at_least_one, default=4, help="the first of which is not timed")
    parser.add_argument("--turns", type=at_least_one, default=2, help="of all sides, after the tries")
    parser.add_argument("--limit-s", type=at_least_one, default=3600, help="of all runs")
    parser.add_argument("--run-limit-s", type=at_least_one, default=300, help="of one run")
    parser.add_argument("--micro-batch-tokens", type=at_least_one, default=MICRO_BATCH_TOKENS)
    parser.add_argument("--peers", nargs="*", choices=MODULES, default=list(MODULES))
    parser.add_argument("--ours", nargs="+", help="settings of ours instead of the preset's, such as '7b-host none'")
    parser.add_argument("--tries", type=at_least_one, default=6, help="settings of each side, from the first; not of --ours")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.samples is None:
        arguments.samples = NUM_SAMPLES[arguments.preset]
    if arguments.samples % (GROUP * arguments.ranks):
        parser.error(
            f"--samples {arguments.samples}: here it is a multiple of {GROUP * arguments.ranks}, TRL's groups on each rank"
        )
    arguments.profile = False
    return arguments


def main() -> None:
    arguments = read_arguments()
    deadline = time.monotonic() + arguments.limit_s
    device = "cpu" if arguments.tiny else "cuda"
    if not arguments.tiny:
        require_gpus(arguments.ranks)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running processes are ended
    of_preset = {side: tries for side, tries in TRIES[arguments.preset].items() if side in (OURS, *arguments.peers)}
    runnable = {
        side: [each for each in tries if not (arguments.tiny and any(part in each for part in ON_GPUS))][: arguments.tries]
        for side, tries in of_preset.items()
    }
    if arguments.ours is not None:
        runnable[OURS] = arguments.ours
    arguments.out.mkdir(parents=True, exist_ok=True)

    def keep(results: list[dict[str, Any]]) -> None:
        print(json.dumps(results[-1]), flush=True)
        (arguments.out / "trainer_peers_gpu.json").write_text(json.dumps(results, indent=1))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps(work_of(arguments)))
        node = node_for(arguments.preset, gpu_bytes=1, device=device, num_ranks=arguments.ranks)
        make_model_apart(folder / "model", node, device)

        def run(side: str, settings: str) -> dict[str, Any]:
            return run_ours(settings, folder, arguments) if side == OURS else run_peer(side, settings, folder, arguments)

        print(table(measure(runnable, run, keep, turns=arguments.turns, deadline=deadline)))


if __name__ == "__main__":
    main()
