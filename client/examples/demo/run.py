"""The demo: makes the task, starts the three services, trains with GRPO, stops them. Run it with `make demo`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tasuki.cli.__main__ import exit_code_of
from tasuki.cli.train import run
from tasuki.config.load import load_config

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[2] / "deploy" / "config" / "demo.toml"


def main() -> int:
    started = time.monotonic()
    arguments = _parser().parse_args()
    return exit_code_of(lambda: demo(arguments.output, seed=arguments.seed, overrides=arguments.overrides, started=started))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    return parser


def demo(output: Path, *, seed: int, overrides: list[str], started: float) -> int:
    if (output / "config.toml").exists() and (output / "task" / "eval.jsonl").exists():
        shutil.rmtree(output)  # an earlier demo's
    output.mkdir(parents=True)
    config = output / "config.toml"
    shutil.copy(CONFIG, config)

    sys.stdout.write(f"making the task in {output / 'task'}: tokenizer, tiny model, supervised start\n")
    sys.stdout.flush()
    # In a process of its own: its torch must not sit in memory beside the services.
    subprocess.run([sys.executable, HERE / "make_task.py", output / "task", "--seed", str(seed)], check=True)
    seeds = [f"{table}.seed={seed}" for table in ("trainer", "rollout", "train")]
    return run(load_config(config, overrides=[*seeds, *overrides]), config_dir=HERE, started=started)


if __name__ == "__main__":
    sys.exit(main())
