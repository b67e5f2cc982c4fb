"""Training steps beside torchtitan's: `PYTHONPATH=FOLDER:$PYTHONPATH python -m tests.bench.trainer_peers_gpu [--ranks 2] [--rounds 2]`.

FOLDER holds what tests/bench/titan-requirements.txt names. Qwen2.5's 7B shape, random weights, float32 masters, bfloat16
compute, AdamW, clipping, the samples of `trainer_step_gpu` in the same micro-batches. torchtitan is tuned first: recomputation and its
compiler are tried, and the fastest that runs is taken. Then both sides take turns. Prints a line of JSON a run, a table, and writes
trainer_peers_gpu.json. --tiny tries it with tiny models on a CPU.

Each learns the second half of every sample: tasuki a policy loss with log-probs and entropy, torchtitan cross-entropy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from tasuki.models.family import Model, full_attention
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.plan import plan_micro_batches
from tests.bench.gpus import at_least_one, require_gpus
from tests.bench.plan_gpu import layout_of
from tests.bench.trainer_step_gpu import CASES, MICRO_BATCH_TOKENS, lengths_of, run_preset

PRESET = "qwen2.5-7b"
OURS = ("7b", "7b-attention", "7b-kept")
MULTIPLE = 128
LIMIT_S = 420


def work_of(arguments: Namespace) -> dict[str, Any]:
    """What a rank of torchtitan is told."""
    device = "cpu" if arguments.tiny else "cuda"
    shape = layout_of(PRESET, gpu_bytes=1, device=device, num_ranks=1).model
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_titan(recompute: str, is_compiled: bool, arguments: Namespace) -> dict[str, Any]:
    """In processes of its own. `error` has the last lines where it cannot run, as when memory is short."""
    facts = {"side": "torchtitan", "recompute": recompute, "compile": is_compiled}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.json"
        work.write_text(json.dumps(work_of(arguments)))
        options = [
            "--recompute",
            recompute,
            *(["--compile"] if is_compiled else []),
            *(["--device", "cpu"] if arguments.tiny else []),
        ]
        command = [sys.executable, "-m", "tests.bench.titan_step", str(work), *options]
        shared = os.environ | {"WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                command,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(arguments.ranks)
        ]
        try:
            outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return {**facts, "error": f"took more than {LIMIT_S} s"}
        finally:
            for rank in ranks:
                rank.kill()
    answers = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    return json.loads(answers[-1].removeprefix("RESULT ")) if answers else {**facts, "error": outputs[0][-1500:]}


def run_ours(cases: list[str], arguments: Namespace) -> Iterator[dict[str, Any]]:
    for result in run_preset(PRESET, cases, arguments):
        yield {"side": "tasuki", **result}


def fastest(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Raises SystemExit, with what each said, when none ran."""
    ran = [result for result in results if "tokens_per_s" in result]
    if not ran:
        raise SystemExit("\n".join(str(result.get("error")) for result in results))
    return max(ran, key=lambda result: result["tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--ranks", type=at_least_one, default=2)
    parser.add_argument("--samples", type=at_least_one, default=48)
    parser.add_argument("--steps", type=at_least_one, default=4, help="the first of which is not timed")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="turns of both sides after tuning")
    parser.add_argument("--micro-batch-tokens", type=at_least_one, default=MICRO_BATCH_TOKENS)
    parser.add_argument("--recompute", nargs="+", choices=("none", "selective", "full"), default=["selective", "full"])
    parser.add_argument(
        "--compile", nargs="+", choices=("on", "off"), default=["on", "off"], help="of torchtitan's blocks and loss"
    )
    parser.add_argument("--cases", nargs="+", choices=[case for case in CASES if CASES[case][0] == PRESET], default=list(OURS))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.backends, arguments.profile = ["default"], False
    if not arguments.tiny:
        require_gpus(arguments.ranks)
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(result), flush=True)
        results.append(result)
        (arguments.out / "trainer_peers_gpu.json").write_text(json.dumps(results, indent=1))
        return result

    choices = product(arguments.recompute, arguments.compile)
    theirs = fastest([keep(run_titan(recompute, compiler == "on", arguments)) for recompute, compiler in choices])
    ours = fastest([keep(result) for result in run_ours(arguments.cases, arguments)])
    pairs = [(ours["tokens_per_s"], theirs["tokens_per_s"])]
    for _ in range(arguments.rounds - 1):
        theirs_again = keep(run_titan(theirs["recompute"], theirs["compile"], arguments))
        ours_again = keep(next(run_ours([ours["case"]], arguments)))
        pairs.append((ours_again["tokens_per_s"], theirs_again["tokens_per_s"]))
    print(f"tasuki {ours['case']}: {[pair[0] for pair in pairs]} tokens/s a GPU")
    print(f"torchtitan, recompute {theirs['recompute']}, compile {theirs['compile']}: {[pair[1] for pair in pairs]}")
    print(f"ratio: {statistics.median(mine / peer for mine, peer in pairs):.3f}")


if __name__ == "__main__":
    main()
