"""Breakdown of a training step's time: a table from a run's metrics.jsonl.

Usage: python tools/bench/step_time.py runs/demo
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = """# Where a training step's time goes

Made by `make demo` and then `.venv/bin/python tools/bench/step_time.py runs/demo`, on {cpus} CPUs ({cpu_model}),
without a GPU. {num_steps} steps of {prompts} prompts x {samples} samples, at most {tokens} new tokens each, on the demo's model of
0.1 million parameters. The first step, which also warms up, and the evaluations are left out. Median and quartiles, in milliseconds of
wall clock. The client's clock times the parts, the coordinator's the stages. Stages to training run while rewards are computed, so only
the rest of that changeover is a part of the step.

| part | median | quartiles | share |
|---|---:|---:|---:|
{rows}
A model this small shows fixed costs, not arithmetic. Read it for what a changeover adds, not for how a real model divides its time.
"""
PARTS = {
    "to_rollout": "changeover to rollout",
    "generate": "generate",
    "reward": "reward",
    "to_train": "rest of the changeover to training",
    "ref_log_probs": "log-probs of the reference",
    "forward_backward": "log-probs, loss, forward and backward",
    "optim_step": "optimizer",
}
STAGES = {
    "to_rollout": ("LOAD_WEIGHTS", "RESUME_WEIGHTS", "SYNC", "OFFLOAD", "RESUME_KV"),
    "to_train": ("DRAIN", "PAUSE_KV", "PAUSE_WEIGHTS", "LOAD_TRAINER"),
}


BEHIND = "to_train"
"""The changeover whose stages run beside another part of the step."""


def row(name: str, seconds: Sequence[float], *, whole_s: float | None) -> str:
    """whole_s: of the step; None for a row that runs beside its parts."""
    low, median, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
    share = "" if whole_s is None else f"{median / whole_s / 10:.1f} %"
    return f"| {name} | {median:.1f} | {low:.1f} .. {high:.1f} | {share} |\n"


def rows(steps: list[dict[str, Any]]) -> str:
    """Returns one row per part that took place, stages below their changeover, and the total."""
    parts = [part for part in PARTS if part in steps[0]["seconds"]]
    totals = [sum(step["seconds"][part] for part in parts) for step in steps]
    whole_s = statistics.median(totals)
    text = ""
    for part in parts:
        text += row(PARTS[part], [step["seconds"][part] for step in steps], whole_s=whole_s)
        stages = STAGES.get(part, ())
        for stage in stages:
            seconds = [step["stage_seconds"].get(stage, 0.0) for step in steps]
            text += row(f"- `{stage}`", seconds, whole_s=None if part == BEHIND else whole_s)
        if stages and part != BEHIND:
            rest = [step["seconds"][part] - sum(step["stage_seconds"].get(stage, 0.0) for stage in stages) for step in steps]
            text += row("- journal, calls, events", rest, whole_s=whole_s)
    return text + row("**step**", totals, whole_s=whole_s)


def page(run: Path) -> str:
    """Returns the page. Raises OSError, ValueError, KeyError or TypeError unless the run has two steps after its first."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in lines[1:] if "optim_step" in step["seconds"]]
    if len(steps) < 2:
        raise ValueError(f"quartiles need two steps after the first, and metrics.jsonl has {len(steps)}")
    train = tomllib.loads((run / "config.toml").read_text())["train"]
    cpu_models = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return PAGE.format(
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=cpu_models[0] if cpu_models else "unknown",
        num_steps=len(steps),
        prompts=train["prompts_per_step"],
        samples=train["group_size"],
        tokens=train["max_new_tokens"],
        rows=rows(steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="output folder of a training run")
    args = parser.parse_args()
    try:
        text = page(args.run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{args.run} is not the folder of a training run with its metrics.jsonl and config.toml: {error!r}")
    print(text, end="")


if __name__ == "__main__":
    main()
