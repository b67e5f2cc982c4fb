"""Cost of a step under several plans of micro-batches, as a multiple of the ideal; a simulation without a GPU:

python tools/bench/micro_batches.py [--model qwen2.5-7b] [--seeds 20] [--out FOLDER]

Ranks run in lock step, so the k-th micro-batch of a step costs as much as the most expensive one of any rank. The ideal is the cost of all
real tokens, spread evenly over the ranks. "padded" deals samples in snake order by length and cuts each rank's share into micro-batches of
at most the cap in padded tokens. "packed" is the trainer's plan. "by length" is a plan that also charges the LM head for prompts. Writes
micro_batches.json and micro_batches.png, and prints a table.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.models.family import Model, full_attention
from tasuki.planner.presets import MODELS
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.data.plan import MicroBatchPlan, plan_micro_batches

RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Samples of a step: their lengths in tokens follow a lognormal distribution, cut at `longest`."""

    median: int
    sigma: float
    longest: int
    num_samples: int
    max_tokens: int
    """Tokens per micro-batch."""
    completion_median: int | None = None
    """Median length of completions, with the same sigma; `median` is then that of prompts. None for samples without prompts."""

    def draw(self, seed: int) -> "Drawn":
        random = np.random.default_rng(seed)

        def tokens(median: int, longest: int) -> NDArray[np.int64]:
            drawn = random.lognormal(np.log(median), self.sigma, self.num_samples)
            return np.clip(drawn, 1, longest).astype(np.int64)

        if self.completion_median is None:
            lengths = tokens(self.median, self.longest)
            return Drawn(lengths, lengths)
        prompts, completions = tokens(self.median, self.longest // 2), tokens(self.completion_median, self.longest // 2)
        return Drawn(prompts + completions, completions)


@dataclass(frozen=True, slots=True)
class Drawn:
    """[S] tokens per sample, and per completion."""

    lengths: NDArray[np.int64]
    completions: NDArray[np.int64]

    def flops(self, cost: SampleCost) -> list[float]:
        return cost.flops(self.lengths, completions_S=self.completions).tolist()


LENGTHS = {
    "typical": Lengths(median=1500, sigma=0.8, longest=8192, num_samples=512, max_tokens=16_384),
    "wide": Lengths(median=2000, sigma=0.8, longest=16_384, num_samples=256, max_tokens=16_384),
    "wide, 32k": Lengths(median=2000, sigma=0.8, longest=16_384, num_samples=256, max_tokens=32_768),
    "long-tailed": Lengths(median=1000, sigma=1.2, longest=16_384, num_samples=256, max_tokens=16_384),
    "long": Lengths(median=8000, sigma=0.7, longest=32_768, num_samples=256, max_tokens=32_768),
    "long, few": Lengths(median=8000, sigma=0.7, longest=32_768, num_samples=64, max_tokens=32_768),
    "short": Lengths(median=100, sigma=0.5, longest=512, num_samples=512, max_tokens=16_384),
    "with prompts": Lengths(median=1500, sigma=0.8, longest=16_384, num_samples=256, max_tokens=16_384, completion_median=500),
}


def padded_snake_plan(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Deals samples in snake order, longest first (ranks 0 1 2 2 1 0 0 1 ...), then cuts each rank's share by itself, with padding."""
    snake = [*range(num_ranks), *reversed(range(num_ranks))]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        dealt[snake[turn % len(snake)]].append(index)
    plan: MicroBatchPlan = []
    for indices in dealt:
        plan.append([])
        while indices:
            count = max_tokens // lengths[indices[0]]
            plan[-1].append(indices[:count])
            indices = indices[count:]
    num_steps = max(map(len, plan))
    return [micro_batches + [[]] * (num_steps - len(micro_batches)) for micro_batches in plan]


def packed_cost(plan: MicroBatchPlan, flops: Sequence[float]) -> float:
    """FLOPs that ranks wait for, without padding. flops: per sample."""
    return sum(max(sum(flops[index] for index in part) for part in step) for step in zip(*plan, strict=True))


def padded_cost(plan: MicroBatchPlan, flops: Sequence[float]) -> float:
    """FLOPs that ranks wait for if every sample costs as much as the most expensive one of its micro-batch."""
    return sum(
        max(len(part) * max((flops[index] for index in part), default=0.0) for part in step) for step in zip(*plan, strict=True)
    )


def ideal_cost(flops: Sequence[float], *, num_ranks: int) -> float:
    """FLOPs of all samples, spread evenly over ranks."""
    return sum(flops) / num_ranks


def compare(each: Lengths, *, num_ranks: int, cost: SampleCost, num_seeds: int) -> dict[str, float]:
    """Means over seeds: cost over the ideal and micro-batches per rank under both plans, and time to compute the packed plan."""
    rows: list[dict[str, float]] = []
    for seed in range(num_seeds):
        drawn = each.draw(seed)
        lengths, completions, flops = drawn.lengths.tolist(), drawn.completions.tolist(), drawn.flops(cost)
        ideal = ideal_cost(flops, num_ranks=num_ranks)
        padded = padded_snake_plan(lengths, num_ranks=num_ranks, max_tokens=each.max_tokens)
        started = time.perf_counter()
        packed = plan_micro_batches(
            lengths, completions=completions, num_ranks=num_ranks, max_tokens=each.max_tokens, cost=cost
        )
        seconds = time.perf_counter() - started
        by_length = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=each.max_tokens, cost=cost)
        rows.append({
            "padded": padded_cost(padded, flops) / ideal,
            "packed": packed_cost(packed, flops) / ideal,
            "by_length": packed_cost(by_length, flops) / ideal,
            "padded_micro_batches": len(padded[0]),
            "packed_micro_batches": len(packed[0]),
            "plan_ms": 1e3 * seconds,
        })  # fmt: skip
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def draw(results: dict[str, dict[str, dict[str, float]]], file: Path) -> None:
    """Draws one group of bars per distribution, for the largest number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(results))
    for offset, name, color in ((-0.2, "padded", "#9ecae1"), (0.2, "packed", "#08519c")):
        costs = [by_ranks[str(RANKS[-1])][name] for by_ranks in results.values()]
        bars = axes.bar(places + offset, costs, width=0.38, color=color, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="#8c8c8c", linewidth=0.8)
    axes.set_xticks(places, list(results))
    axes.set_ylabel("step cost over the ideal")
    axes.set_title(f"{RANKS[-1]} ranks", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-7b")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    shape = MODELS[arguments.model]
    cost = sample_cost(Model(shape=shape, attention=full_attention(shape)))
    results = {
        name: {str(ranks): compare(each, num_ranks=ranks, cost=cost, num_seeds=arguments.seeds) for ranks in RANKS}
        for name, each in LENGTHS.items()
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {
        "model": arguments.model,
        "seeds": arguments.seeds,
        "lengths": {name: asdict(each) for name, each in LENGTHS.items()},
        "results": results,
    }
    (arguments.out / "micro_batches.json").write_text(json.dumps(table, indent=1) + "\n")
    draw(results, arguments.out / "micro_batches.png")
    print(
        f"{'lengths':12s} {'ranks':>5s} {'padded':>7s} {'by length':>9s} {'packed':>7s} {'micro-batches':>14s} {'plan, ms':>9s}"
    )
    for name, by_ranks in results.items():
        for ranks, row in by_ranks.items():
            counts = f"{row['padded_micro_batches']:.1f} -> {row['packed_micro_batches']:.1f}"
            print(
                f"{name:12s} {ranks:>5s} {row['padded']:7.3f} {row['by_length']:9.3f} {row['packed']:7.3f} {counts:>14s} "
                f"{row['plan_ms']:9.1f}"
            )


if __name__ == "__main__":
    main()
