"""How far rollout's log-probs are from the trainer's, with logits in bfloat16 and in float32:

python -m tools.bench.log_prob_gap --model FOLDER [--gpus N] [--prompts FILE] [--tokens 128] [--out FOLDER]

Starts a node of the model for each, with the node's own dtypes, has it complete every prompt (chat messages of two-digit sums, or the lines
of --prompts) four times at temperature 1, and has the trainer compute the log-probs of the same tokens. Prints mean, 99th percentile and
maximum of |gap| in nats a token. Writes log_prob_gap.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from tasuki.client import Client, SamplingParams
from tasuki.client.types import TrainingSample
from tasuki.runs.tokenizer import ModelTokenizer
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.plan_node_gpu import tasuki

NUM_SAMPLES = 4
CONFIG = """
state_dir = "node"
device = "cuda"
[model]
path = "{model}"
[trainer]
num_ranks = {gpus}
[rollout]
tp_size = {gpus}
engine = {{ attention_backend = "triton", sampling_backend = "pytorch" }}
"""


def gaps_of(model: Path, prompts: list[list[int]], *, gpus: int, num_tokens: int) -> dict[str, float]:
    """Statistics of |gap| over all tokens."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "node.toml"
        config.write_text(CONFIG.format(model=model.resolve(), gpus=gpus))
        tasuki("up", config)
        try:
            with Client(state_dir=Path(folder) / "node") as client:
                samples = client.generate(prompts, SamplingParams(max_new_tokens=num_tokens), num_samples=NUM_SAMPLES)
                scored = client.compute_log_probs(
                    [
                        TrainingSample(prompt_token_ids=prompts[sample.prompt_index], completion_token_ids=sample.token_ids)
                        for sample in samples
                    ]
                )
        finally:
            tasuki("down", config)
    gaps = np.concatenate([np.abs(sample.rollout_log_probs - theirs) for sample, theirs in zip(samples, scored, strict=True)])
    return {
        "tokens": len(gaps),
        "mean": float(gaps.mean()),
        "p99": float(np.quantile(gaps, 0.99)),
        "max": float(gaps.max()),
    }


def encoded(model: Path, prompts: Path | None) -> list[list[int]]:
    tokenizer = ModelTokenizer(model)
    if prompts is not None:
        return [tokenizer.encode_prompt(line) for line in prompts.read_text().splitlines() if line]
    random = np.random.default_rng(0)
    questions = [f"What is {a} + {b}? Answer with the number alone." for a, b in random.integers(10, 100, (64, 2)).tolist()]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.encode_prompt(chat) for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gpus", type=at_least_one, default=1)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--tokens", type=at_least_one, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    require_gpus(arguments.gpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    prompts = encoded(arguments.model, arguments.prompts)
    results = gaps_of(arguments.model, prompts, gpus=arguments.gpus, num_tokens=arguments.tokens)
    print("  ".join(f"{key} {value:.4g}" for key, value in results.items()), flush=True)
    (arguments.out / "log_prob_gap.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
