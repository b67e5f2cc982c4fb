"""Whole RL steps of a node: `python -m tools.bench.whole_steps [--size qwen2.5-7b] [--gpus 2] [--steps 10] [--set A.B=VALUE]`.

A node with random weights, N trainer ranks and N replicas. A step takes the GPUs for rollout, generates 64 x 8 samples (256 + 512 tokens),
takes the GPUs for training, and trains on all of them, as `tasuki train` does. Each step's parts add up to its seconds; "first_token_ms" is
a request of one token right after the changeover; "gpu_gb" is what the driver reports of the first GPU after a step. The first step, which
warms caches, is left out of the medians; in it "log_prob_gap", mean |rollout - trainer| in nats a token, is taken of 64 samples. --model
takes a folder instead of a size. --tiny: a small model on a CPU. Writes whole_steps.json after each step, and prints medians with their
spread.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasuki.client import Client, Phase, SamplingParams, Stage, TrainingSample
from tasuki.config.load import load_config
from tasuki.node.start import start_node
from tasuki.planner.node import GB
from tools.bench.changeover_gpu import taken_bytes
from tools.bench.node_load import GPU, TINY, Load, make_model

SCORED = 64
"""Samples whose log-probs are compared."""


def step(client: Client, load: Load, random: np.random.Generator, *, is_first: bool) -> dict[str, Any]:
    """Carries out one step. Times are in seconds, but those of changeovers and stages in ms. is_first: also takes the gap."""
    prompts = load.questions(random)
    started = time.perf_counter()
    there = client.acquire(Phase.ROLLOUT)
    serves = time.perf_counter()
    client.generate([prompts[0][:3]], SamplingParams(max_new_tokens=1))
    answered = time.perf_counter()
    samples = client.generate(prompts, load.sampling(load.new_tokens), num_samples=load.group)
    generated = time.perf_counter()
    back = client.acquire(Phase.TRAIN)
    returned = time.perf_counter()
    batch = [
        TrainingSample(
            prompt_token_ids=prompts[each.prompt_index],
            completion_token_ids=each.token_ids,
            rollout_log_probs=each.rollout_log_probs,
            advantages=float(random.normal()),
            policy_version=each.policy_version,
            routed_experts=each.routed_experts,
        )
        for each in samples
    ]
    packed = time.perf_counter()
    gap = {"log_prob_gap": gap_of(client, batch[:SCORED])} if is_first else {}
    client.forward_backward(batch)
    learned = time.perf_counter()
    norm = client.optim_step(learning_rate=1e-6).grad_norm
    ended = time.perf_counter()
    new_tokens = sum(len(each.token_ids) for each in samples)
    return {
        "step_s": ended - started,
        "to_rollout_ms": 1e3 * (serves - started),
        "first_token_ms": 1e3 * (answered - serves),
        "generate_s": generated - answered,
        "generated_tokens_per_s": new_tokens / (generated - answered),
        "to_train_ms": 1e3 * (returned - generated),
        "forward_backward_s": learned - packed,
        "optim_step_s": ended - learned,
        "trained_tokens_per_s": (new_tokens + len(samples) * load.prompt_tokens) / (ended - packed),
        "grad_norm": norm,
        **gap,
        "gpu_gb": taken_bytes(load.device) / GB,
        "stages_ms": {
            stage: 1e3 * each.seconds for each in [*there, *back] if (stage := Stage.of(each.stage)) and each.seconds
        },
    }


def gap_of(client: Client, batch: list[TrainingSample]) -> float:
    scored = client.compute_log_probs(batch)
    return float(np.abs(np.concatenate([each.rollout_log_probs for each in batch]) - np.concatenate(scored)).mean())


def summary(steps: list[dict[str, Any]]) -> dict[str, str]:
    """Returns each figure's median over the steps after the first, and its range."""
    later = steps[1:] or steps
    figures = {key: [each[key] for each in later] for key in later[0] if key not in ("stages_ms", "log_prob_gap")}
    return {key: f"{statistics.median(of):.4g} ({min(of):.4g} to {max(of):.4g})" for key, of in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--size", default="qwen2.5-7b")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="a key of the node's configuration")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    load = TINY if arguments.tiny else replace(GPU, gpus=arguments.gpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (model := arguments.model):
            make_model(arguments.size, model := folder / "model", is_tiny=arguments.tiny)
        (folder / "node.toml").write_text(load.config("needed"))
        config = load_config(folder / "node.toml", overrides=[f'model.path="{model.absolute()}"', *arguments.set])
        steps = list[dict[str, Any]]()
        node = start_node(config, tell=lambda line: print(line, file=sys.stderr))
        try:
            with Client(state_dir=config.state_dir, timeout_s=300.0) as client:
                random = np.random.default_rng(0)
                for number in range(arguments.steps):
                    steps.append(step(client, load, random, is_first=number == 0))
                    (arguments.out / "whole_steps.json").write_text(json.dumps(steps, indent=1) + "\n")
        finally:
            node.stop()
    print(f"log_prob_gap             {steps[0]['log_prob_gap']:.4g}")
    for key, text in summary(steps).items():
        print(f"{key:24s} {text}")


if __name__ == "__main__":
    main()
