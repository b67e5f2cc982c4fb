"""A small mixture learns the demo's task for 30 steps, on a CPU with a bfloat16 engine:

python -m tools.bench.small_mixture OUTPUT [--seed N] [--set trainer.router_replay=false]

Leaves a run's folder; prints rewards, held-out scores, and the log-prob gap over all steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from unittest.mock import patch

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from client.examples.demo import make_task

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("train.num_steps=30", "train.stop_at_eval_score=1.1", "trainer.num_ranks=1", "rollout.dtype=bfloat16")


def make_model() -> Qwen3MoeForCausalLM:
    """Makes one of 0.5 million parameters: 16 experts in each of four layers, of which a token passes four."""
    ids = {f"{name}_token_id": make_task.VOCABULARY.index(f"<{name}>") for name in ("bos", "eos", "pad")}
    shape = {
        "vocab_size": make_task.VOCAB_SIZE,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **ids, num_experts=16, num_experts_per_tok=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/config/demo.toml", output / "config.toml")
    shutil.copy(ROOT / "client/examples/demo/reward.py", output)
    with patch.object(make_task, "make_model", make_model):
        make_task.make_task(output / "task", seed=arguments.seed)
    settings = [f"--set={each}" for each in (f"seed={arguments.seed}", *SETTINGS, *arguments.set)]
    subprocess.run([sys.executable, "-m", "tasuki.cli", "train", output / "config.toml", *settings], check=True)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps, scores = rows[:-1], [row["eval_score"] for row in rows if row["eval_score"] is not None]
    rewards, gaps = [row["mean_reward"] for row in steps], [row["metrics"] for row in steps]
    print(f"reward {rewards[0]:.3f} to {mean(rewards[-5:]):.3f}, held-out {scores[0]:.3f} to {scores[-1]:.3f}")
    print(
        f"gap mean {mean(each['log_prob_gap'] for each in gaps):.2e} max {max(each['log_prob_gap_max'] for each in gaps):.2f}"
    )
    print(f"k3 {mean(each['rollout_kl'] for each in gaps):.2e}")


if __name__ == "__main__":
    main()
