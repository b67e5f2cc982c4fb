"""Train SmolLM2-135M-Instruct on two-digit sums, then score the exported folder in plain transformers. Run it with `make example`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tasuki.cli.__main__ import USER_ERROR, exit_code_of
from tasuki.cli.train import run, told_how_to_continue
from tasuki.config.environment import cpu_threads
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import PathExists, PathNotFound

HERE = Path(__file__).resolve().parent
CPU, GPU = HERE / "arithmetic.toml", HERE / "gpu.toml"
MODEL = HERE.parents[2] / ".example" / "model"
# Greedy answers in bfloat16 that depend on the last bit differ between engines.
TOLERANCE = 0.03
GSM8K = [
    "rollout.context_length=1024",
    "train.max_new_tokens=320",
    "train.reward.function.exact=rewards:gsm8k_exact",
    "train.reward.function.form=rewards:gsm8k_form",
]


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="folder of a model with a chat template; by default SmolLM2's"
    )
    parser.add_argument(
        "--gpu", dest="config", action="store_const", const=GPU, default=CPU, help="train on one GPU, by gpu.toml"
    )
    parser.add_argument("--gsm8k", type=Path, help="JSONL of `question` and `answer`, instead of sums")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    arguments = parser.parse_args()
    return exit_code_of(lambda: example(arguments, started=started))


def example(arguments: argparse.Namespace, *, started: float) -> int:
    output: Path = arguments.output
    make_task(output, arguments.config, seed=arguments.seed, model=arguments.model, gsm8k=arguments.gsm8k)
    overrides = [f"seed={arguments.seed}"]
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # noqa: TID251  of the node's ranks
    if arguments.gsm8k is not None:
        overrides += GSM8K
    overrides += arguments.overrides
    config = load_config(output / "config.toml", overrides=overrides)
    with told_how_to_continue(config, output / "config.toml", overrides):
        return run(config, config_dir=output, started=started) or compare(config, output, started=started)


def make_task(output: Path, config: Path, *, seed: int, model: Path, gsm8k: Path | None) -> None:
    """Write config.toml and task/ into the run's folder.

    Raises PathNotFound without the model, PathExists for another folder, SystemExit if make_task.py refuses, which says why.
    """
    if not (model / "tokenizer_config.json").exists():
        raise PathNotFound(f"there is no model in {model}; `make example` makes it", path=model)
    remove_earlier(output)
    output.mkdir(parents=True)
    shutil.copy(config, output / "config.toml")
    shutil.copy(HERE / "rewards.py", output)  # the folder then works with every command of tasuki
    (output / "task").mkdir()
    (output / "task" / "model").symlink_to(model.resolve())
    options = ["--gsm8k", gsm8k] if gsm8k else []
    command = [sys.executable, HERE / "make_task.py", output / "task", "--seed", str(seed), *options]
    # In a separate process group: Ctrl-C ends it through this process, without a traceback.
    if subprocess.run(command, check=False, process_group=0).returncode != 0:
        sys.exit(USER_ERROR)


def remove_earlier(output: Path) -> None:
    """Removes the folder of an earlier run, even of one that failed at once. Raises PathExists for another folder."""
    config = output / "config.toml"
    shipped = [path.read_bytes() for path in (CPU, GPU)]
    if config.exists() and ((output / "task" / "eval.jsonl").exists() or config.read_bytes() in shipped):
        shutil.rmtree(output)
    if output.exists():
        raise PathExists(f"{output} is not from this example; move it, or give another --output", path=output)


def compare(config: NodeConfig, output: Path, *, started: float) -> int:
    """Print the held-out scores. Returns 1 if plain transformers scores the exported model differently, 2 if it does not score it."""
    assert config.train is not None
    assert config.train.reward is not None and isinstance(config.train.reward.function, dict)
    reward = config.train.reward.function["exact"].partition(":")[2]
    options = [
        "--reward",
        reward,
        "--max-new-tokens",
        str(config.train.max_new_tokens),
        "--threads",
        str(cpu_threads()),
        "--device",
        config.device,
    ]
    command = [sys.executable, HERE / "score.py", output / "model", output / "task" / "eval.jsonl", *options]
    # In a separate process, without tasuki.
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, process_group=0)
    if done.returncode != 0:
        print(f"the exported model was not scored: score.py ended with code {done.returncode}", file=sys.stderr)
        return USER_ERROR
    scored = float(done.stdout)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    before, *_, after = [score for line in lines if (score := json.loads(line)["metrics"].get("eval/mean/exact")) is not None]
    print(
        f"held-out: {before:.3f} before, {after:.3f} after, {scored:.3f} in transformers; {time.monotonic() - started:.0f} s in all"
    )
    if abs(scored - after) > TOLERANCE:
        print(f"the exported model scores {scored:.3f} in transformers, but {after:.3f} in the run", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
