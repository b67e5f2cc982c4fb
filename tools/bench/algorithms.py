"""The demo's task by every algorithm: `python tools/bench/algorithms.py [--seeds 0 1 2] [--jobs N] [--gpu] [--out FOLDER]`.

Each run starts from the same supervised model of its seed and ends at a held-out score of 0.95, or after 60 steps. Every run has its own
node, on a CPU unless --gpu is given; --jobs of them run side by side, so seconds compare only within one value of it. Writes
algorithms.json and prints a table.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "client" / "examples" / "demo" / "run.py"
TARGET = 0.95
SETTINGS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_pp": (),
    "reinforce_pp_baseline": (),
    "remax": (),
    "ppo": ("trainer.critic.learning_rate=3e-3",),
    "dapo": (),
    "gspo": (),
    "cispo": (),
}
"""Overrides that each algorithm's run adds."""
GPU = (
    'device="cuda"',
    "trainer.num_ranks=1",
    'rollout.engine.attention_backend="triton"',
    'rollout.engine.sampling_backend="pytorch"',
    'rollout.dtype="bfloat16"',
    'trainer.compute_dtype="bfloat16"',
)


def run(algorithm: str, seed: int, folder: Path, *, settings: tuple[str, ...]) -> dict[str, Any]:
    """Returns the run's summary, without a score if the run failed."""
    output = folder / f"{algorithm}-{seed}"
    overrides = [f"train.algorithm={algorithm}", f"train.stop_at_eval_score={TARGET}", *SETTINGS[algorithm], *settings]
    command = [sys.executable, DEMO, "--seed", str(seed), "--output", output]
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {
            "algorithm": algorithm,
            "seed": seed,
            "exit_code": done.returncode,
            "error": done.stderr.strip().splitlines()[-30:],
        }
    summary = json.loads((output / "summary.json").read_text())
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    training_s = sum(sum(step["seconds"].values()) for step in steps)
    return {"algorithm": algorithm, "seed": seed, "training_s": round(training_s, 1), **summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = [(algorithm, seed) for algorithm in arguments.algorithms for seed in arguments.seeds]
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(
            lambda case: run(*case, arguments.out / "algorithms", settings=GPU if arguments.gpu else ()), cases
        ):
            results.append(result)
            (arguments.out / "algorithms.json").write_text(json.dumps(results, indent=1) + "\n")
            shown = result.get("error") or (
                f"{result['eval_score_before']:.3f} -> {result['eval_score_after']:.3f}, {result['steps']} steps, "
                f"{result['training_s']:.1f} s of training"
            )
            print(f"{result['algorithm']:24s} seed {result['seed']}  {shown}", flush=True)


if __name__ == "__main__":
    main()
