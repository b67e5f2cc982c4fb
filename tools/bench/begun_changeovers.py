"""Time of a demo step when the changeover to ROLLOUT begins right after the optimizer step, against one that begins when needed.

The early start can hide the time between the two: writing the step's samples and its metrics line.

Usage: python -m tools.bench.begun_changeovers FOLDER (must not exist). One node on a CPU runs both kinds in turns of a few steps. A step is
the time between two reports; each report writes the step's line, as in `tasuki train`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sample_dump import SampleDump
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase
from tasuki.config.load import load_config
from tasuki.config.places import node_targets
from tasuki.config.train_schema import EvalConfig, TrainConfig
from tasuki.runs.folder import MetricsFile
from tasuki.runs.rewards import open_rewards
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.supervisor.node import running_node

DEMO = Path(__file__).parents[2] / "client" / "examples" / "demo"
CONFIG = DEMO.parents[2] / "deploy" / "config" / "demo.toml"


class WaitingClient(Client):
    """Starts a changeover to ROLLOUT only when it is needed."""

    def begin_acquire(self, phase: Phase) -> None:
        if phase is not Phase.ROLLOUT:
            super().begin_acquire(phase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=12, help="of one turn; the first two are left out")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    shutil.copy(CONFIG, args.folder / "config.toml")
    shutil.copy(DEMO / "reward.py", args.folder)
    subprocess.run([sys.executable, DEMO / "make_task.py", args.folder / "task"], check=True)
    config = load_config(args.folder / "config.toml", overrides=args.overrides)
    train = config.train
    assert train is not None
    dataset = Dataset(read_jsonl(train.dataset), seed=train.seed)
    seconds: dict[str, list[float]] = {"begun": [], "not begun": []}
    waits: dict[str, list[float]] = {name: [] for name in seconds}
    writing: list[float] = []
    with (
        open_rewards(train.reward, [args.folder], num_workers=train.reward.num_workers) as rewards,
        SampleDump(args.folder / "samples") as dump,
        running_node(config),
        Client(node_targets(config)["coordinator"]) as begins,
        WaitingClient(node_targets(config)["coordinator"]) as waiting,
    ):
        begins.begin_run()
        settings = train.model_copy(
            update={"num_steps": args.steps, "eval": EvalConfig(), "eval_every": None, "stop_at_eval_score": None}
        )
        tokenizer = ModelTokenizer(config.model.path)
        for turn in range(2 * args.turns):
            # abba order, so that drift over time favours neither kind
            is_begun = turn % 4 in (0, 3)
            own = settings.model_copy(update={"output_dir": args.folder / f"turn-{turn}"})
            loop = RlLoop(begins if is_begun else waiting, dataset, [], tokenizer, rewards, own, dump=dump)
            took, waited, wrote = turn_of(loop, own)
            seconds["begun" if is_begun else "not begun"].append(took)
            waits["begun" if is_begun else "not begun"].append(waited)
            writing.append(wrote)
    print(json.dumps({
        "step_ms": {name: ms(each) for name, each in seconds.items()},
        "waited_for_rollout_ms": {name: ms(each) for name, each in waits.items()},
        "written_ms": ms(writing),
        "step_gain_ms": gain_ms(seconds),
        "wait_gain_ms": gain_ms(waits),
    }, indent=2))  # fmt: skip


def turn_of(loop: RlLoop, settings: TrainConfig) -> tuple[float, float, float]:
    """Median seconds of a step, of its wait for the changeover to ROLLOUT, and of writing its samples and its line."""
    settings.output_dir.mkdir()
    metrics, steps = MetricsFile(settings.output_dir), list[Step]()
    ends, wrote = list[float](), list[float]()

    def report(step: Step) -> None:
        started = time.perf_counter()
        metrics.report(step)
        ends.append(time.perf_counter())
        wrote.append(ends[-1] - started + step.seconds.get("write_samples", 0.0))
        steps.append(step)

    loop.run(report)
    # The last report belongs to a step that does nothing.
    took = [end - start for start, end in itertools.pairwise(ends[1:-1])]
    waited = statistics.median(step.seconds["to_rollout"] for step in steps[2:-1])
    return statistics.median(took), waited, statistics.median(wrote[2:-1])


def gain_ms(seconds: dict[str, list[float]]) -> list[float]:
    """Quartiles of the gain over pairs of turns."""
    gains = [later - earlier for earlier, later in zip(seconds["begun"], seconds["not begun"], strict=True)]
    return [round(1000 * one, 1) for one in statistics.quantiles(gains, n=4)]


def ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 1)


if __name__ == "__main__":
    main()
