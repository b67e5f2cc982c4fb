"""`make bench`: samples per second of a whole GRPO loop on a CPU, tasuki beside TRL's GRPOTrainer, in one run on one machine.

Both sides have the same model, prompts, batch and reward, and the same two CPUs with at most two threads of arithmetic. TRL is tuned first:
number format, generation mode, micro-batches and threads are tried, and the fastest is taken. Then the two take turns. Whole steps are
timed: generation, rewards, advantages, forward, backward, optimizer, and for tasuki both changeovers. Start-up and warm-up steps are left
out. The learning rate is small, so that all steps do about the same work.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH, DEMO = ROOT / "tools/bench", ROOT / "client/examples/demo"
NUM_THREADS = 2
LEARNING_RATE = 1e-6
MAX_NEW_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one step, the same on both sides."""

    prompts_per_step: int
    group_size: int

    @property
    def num_samples(self) -> int:
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True)
class TrlSetting:
    dtype: str
    generation: str
    num_micro_batches: int = 1
    num_threads: int = NUM_THREADS


def run_trl(python: Path, task: Path, load: Load, setting: TrlSetting, *, num_steps: int, warmup_steps: int) -> dict[str, Any]:
    output = task / "trl.json"
    values = {
        "model": task / "model",
        "dataset": task / "train.jsonl",
        "reward": "reward:exact",
        "output": output,
        "dtype": setting.dtype,
        "generation": setting.generation,
        "num-micro-batches": setting.num_micro_batches,
        "num-threads": setting.num_threads,
        "num-steps": num_steps,
        "warmup-steps": warmup_steps,
        "prompts-per-step": load.prompts_per_step,
        "group-size": load.group_size,
        "max-new-tokens": MAX_NEW_TOKENS,
        "temperature": 1.0,
        "learning-rate": LEARNING_RATE,
        "seed": 0,
    }
    arguments = [str(part) for name, value in values.items() for part in (f"--{name}", value)]
    return _run([python, BENCH / "trl_grpo.py", *arguments], cwd=task, output=output)


def run_tasuki(task: Path, load: Load, *, num_ranks: int, num_steps: int, warmup_steps: int) -> dict[str, Any]:
    config, output = task / "node.toml", task / "tasuki.json"
    config.write_text(
        f"""
        state_dir = "node"
        [model]
        path = "model"
        [trainer]
        num_ranks = {num_ranks}
        learning_rate = {LEARNING_RATE}
        compute_dtype = "float32"
        [rollout]
        dtype = "float32"
        engine = {{ disable_radix_cache = true }}
        context_length = 64
        engine.max_total_tokens = 16384
        max_running_requests = {load.num_samples}
        [train]
        dataset = "train.jsonl"
        output_dir = "run"
        num_steps = {warmup_steps + num_steps}
        prompts_per_step = {load.prompts_per_step}
        group_size = {load.group_size}
        max_new_tokens = {MAX_NEW_TOKENS}
        [train.reward]
        function = "reward:exact"
        """
    )
    shutil.rmtree(task / "run", ignore_errors=True)
    arguments = ["--config", config, "--output", output, "--warmup-steps", str(warmup_steps)]
    return _run([Path(sys.executable), BENCH / "tasuki_grpo.py", *arguments], cwd=task, output=output)


def _run(command: list[str | Path], *, cwd: Path, output: Path) -> dict[str, Any]:
    output.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(NUM_THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(cwd), *(str(ROOT / root) for root in ("protos", "services", "client"))])
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command[:2]))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(output.read_text())


def tuned_trl(python: Path, task: Path, load: Load) -> TrlSetting:
    """Returns the fastest setting by the median of a few steps: first number format and generation mode, then smaller micro-batches and one
    thread."""

    def median_s(setting: TrlSetting) -> float:
        median = statistics.median(run_trl(python, task, load, setting, num_steps=4, warmup_steps=2)["seconds"])
        print(f"  TRL with {setting}: {load.num_samples / median:.0f} samples/s", flush=True)
        return median

    choices = itertools.product(("float32", "bfloat16"), ("static", "continuous"))
    seconds = {setting: median_s(setting) for setting in (TrlSetting(*choice) for choice in choices)}
    for change in ({"num_micro_batches": 2}, {"num_threads": 1}):
        changed = replace(min(seconds, key=lambda setting: seconds[setting]), **change)
        seconds[changed] = median_s(changed)
    return min(seconds, key=lambda setting: seconds[setting])


def rates(seconds: list[float], load: Load) -> dict[str, float]:
    """Samples per second over the steps: median, and the quartiles as spread."""
    per_step = [load.num_samples / value for value in seconds]
    low, median, high = statistics.quantiles(per_step, n=4)
    return {"median": median, "low_quartile": low, "high_quartile": high, "steps": len(per_step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, default=15, help="of each side in each round")
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-ranks", type=int, choices=(1, 2), default=2, help="of our trainer; they share the two threads")
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    load = Load(args.prompts_per_step, args.group_size)
    cpus = sorted(os.sched_getaffinity(0))[:NUM_THREADS]
    os.sched_setaffinity(0, cpus)  # inherited by every child process
    args.output.mkdir(parents=True, exist_ok=True)
    steps: dict[str, list[float]] = {"tasuki": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="tasuki-bench-") as folder:
        task = Path(folder)
        subprocess.run([sys.executable, DEMO / "make_task.py", task], check=True, stdout=subprocess.DEVNULL)
        shutil.copy(DEMO / "reward.py", task)
        print(
            f"GRPO, {load.prompts_per_step} prompts x {load.group_size} samples x {MAX_NEW_TOKENS} tokens a step; CPUs {cpus}"
        )
        setting = tuned_trl(args.trl_python, task, load)
        counts = {"num_steps": args.num_steps, "warmup_steps": args.warmup_steps}
        parts: list[dict[str, float]] = []
        for _ in range(args.rounds):
            ours = run_tasuki(task, load, num_ranks=args.num_ranks, **counts)
            theirs = run_trl(args.trl_python, task, load, setting, **counts)
            steps["tasuki"] += ours["seconds"]
            steps["trl"] += theirs["seconds"]
            parts += ours["parts"]
    result = {name: rates(seconds, load) for name, seconds in steps.items()}
    ratio = result["tasuki"]["median"] / result["trl"]["median"]
    for name, rate in result.items():
        print(
            f"{name:7} {rate['median']:7.0f} samples/s  (quartiles {rate['low_quartile']:.0f} .. {rate['high_quartile']:.0f})"
        )
    print(f"tasuki / TRL = {ratio:.2f}")
    report = {
        "ratio": ratio,
        "samples_per_second": result,
        "load": asdict(load),
        "trl": asdict(setting),
        "trainer_ranks": args.num_ranks,
        "seconds": steps,
        "tasuki_parts": parts,
    }
    (args.output / "compare_trl.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
