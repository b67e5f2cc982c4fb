"""Training steps beside torchtitan's and TRL's: `PYTHONPATH=FOLDER:$PYTHONPATH python -m tests.bench.trainer_peers_gpu [--ranks 2]`.

FOLDER holds what tests/bench/step-peers-requirements.txt names. Qwen2.5's 7B shape, random weights, float32 masters, bfloat16 compute,
AdamW, clipping, the samples of `trainer_step_gpu`. Each side is tuned first: its settings below are tried, ours with and without
trainer.compile, and the fastest that runs is taken. Then all take turns. Prints a line of JSON a run and a table, and writes
trainer_peers_gpu.json. --tiny tries it with tiny models on a CPU; torchtitan shards on GPUs alone, so take --ranks 1.

Each learns the second half of every sample: tasuki and TRL by a policy loss with log-probs and entropy, torchtitan by cross-entropy.
torchtitan has tasuki's micro-batches. TRL makes its own, and pads them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasuki.models.family import Model, full_attention
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.plan import plan_micro_batches
from tests.bench.gpus import at_least_one, require_gpus
from tests.bench.plan_gpu import layout_of, make_model
from tests.bench.trainer_step_gpu import CASES, MICRO_BATCH_TOKENS, lengths_of, run_preset
from tests.ports import free_port

PRESET = "qwen2.5-7b"
OURS = ("7b", "7b-attention", "7b-kept")
PEERS = {
    "torchtitan": (
        ["--recompute", "selective", "--compile"],
        ["--recompute", "full", "--compile"],
        ["--recompute", "selective"],
        ["--recompute", "full"],
    ),
    "trl": (
        ["--recompute", "full", "--batch", "2"],
        ["--recompute", "full", "--batch", "2", "--liger"],
        ["--recompute", "full", "--batch", "4", "--liger"],
        ["--recompute", "full", "--batch", "2", "--attention", "flash_attention_4"],
    ),
}
MODULES = {"torchtitan": "tests.bench.titan_step", "trl": "tests.bench.trl_step"}
MULTIPLE = 128


def work_of(arguments: Namespace) -> dict[str, Any]:
    """What a peer's rank is told."""
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


def run_peer(side: str, settings: Sequence[str], folder: Path, arguments: Namespace) -> dict[str, Any]:
    """A process a rank. `error` has the last lines of one that cannot run, as when memory is short."""
    facts = {"side": side, "settings": list(settings)}
    shared = os.environ | {"WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = [*settings, *(["--device", "cpu"] if arguments.tiny else [])]
    command = [sys.executable, "-m", MODULES[side], str(folder / "work.json"), str(folder / "model"), *options]
    logs = [folder / f"rank{rank}.log" for rank in range(arguments.ranks)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        for rank in ranks:
            rank.wait(arguments.limit_s)
    except subprocess.TimeoutExpired:
        return {**facts, "error": f"took more than {arguments.limit_s} s"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = logs[0].read_text(errors="replace")
    answers = [line for line in said.splitlines() if line.startswith("RESULT ")]
    return facts | (json.loads(answers[-1].removeprefix("RESULT ")) if answers else {"error": said[-1500:]})


def run_ours(cases: list[str], arguments: Namespace) -> Iterator[dict[str, Any]]:
    for result in run_preset(PRESET, cases, arguments):
        yield {"side": "tasuki", **result}


def fastest(results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """None when none ran."""
    ran = [result for result in results if "tokens_per_s" in result]
    return max(ran, key=lambda result: result["tokens_per_s"]) if ran else None


def table(results: list[dict[str, Any]], best: dict[str, dict[str, Any]]) -> str:
    """Of the settings that were taken: tokens/s a GPU of each turn, and tasuki's over the peer's of the same turn."""
    turns = {side: [each["tokens_per_s"] for each in results if each["side"] == side and each.get("is_turn")] for side in best}
    lines: list[str] = []
    for side, rates in turns.items():
        ratios = [mine / peer for mine, peer in zip(turns["tasuki"], rates, strict=False)]
        ratio = f", tasuki {statistics.median(ratios):.2f} times as fast" if ratios and side != "tasuki" else ""
        lines.append(f"{side}, {best[side].get('settings') or best[side].get('case')}: {rates} tokens/s a GPU{ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--ranks", type=at_least_one, default=2)
    parser.add_argument("--samples", type=at_least_one, default=48, help="a multiple of 8 times the ranks")
    parser.add_argument("--steps", type=at_least_one, default=4, help="the first of which is not timed")
    parser.add_argument("--turns", type=at_least_one, default=2, help="of all sides, after tuning")
    parser.add_argument("--limit-s", type=at_least_one, default=300, help="of one run")
    parser.add_argument("--micro-batch-tokens", type=at_least_one, default=MICRO_BATCH_TOKENS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tries", type=at_least_one, default=4, help="settings of each peer, from the first")
    parser.add_argument("--cases", nargs="+", choices=[case for case in CASES if CASES[case][0] == PRESET], default=list(OURS))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.backends, arguments.compile, arguments.profile = ["default"], ["none", "blocks"], False
    device = "cpu" if arguments.tiny else "cuda"
    if not arguments.tiny:
        require_gpus(arguments.ranks)
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any], *, is_turn: bool = False) -> dict[str, Any]:
        results.append({**result, "is_turn": is_turn})
        print(json.dumps(results[-1]), flush=True)
        (arguments.out / "trainer_peers_gpu.json").write_text(json.dumps(results, indent=1))
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps(work_of(arguments)))
        if "trl" in arguments.peers:
            make_model(folder / "model", layout_of(PRESET, gpu_bytes=1, device=device, num_ranks=arguments.ranks), device)
        tried = {"tasuki": [keep(result) for result in run_ours(arguments.cases, arguments)]}
        for side in arguments.peers:
            tried[side] = [keep(run_peer(side, settings, folder, arguments)) for settings in PEERS[side][: arguments.tries]]
        best = {side: found for side, answers in tried.items() if (found := fastest(answers)) is not None}
        for _ in range(arguments.turns):
            for side, taken in best.items():
                if side == "tasuki":
                    arguments.compile = [taken["compile"]]
                    keep(next(run_ours([taken["case"]], arguments)), is_turn=True)
                else:
                    keep(run_peer(side, taken["settings"], folder, arguments), is_turn=True)
    print(table(results, best))


if __name__ == "__main__":
    main()
