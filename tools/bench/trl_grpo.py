"""Peer side of `make bench`: GRPO by TRL's GRPOTrainer on a CPU. Runs in another environment (.bench-venv).

Prints one JSON object: seconds of each step and the mean reward of each. A step is everything between two `on_step_end` calls of the
trainer: generation, rewards, advantages, forward, backward, optimizer. Start-up and the warm-up steps are left out.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Wall-clock seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def batched(reward: Callable[..., float], rewards: list[float], *, fields: list[str]) -> Callable[..., list[float]]:
    """TRL's form of a reward function: one call per batch, with the dataset's columns as lists. Keeps each batch's mean in `rewards`."""

    def reward_batch(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        scores = [
            float(reward(prompt=prompt, completion=completion, **{name: columns[name][index] for name in fields}))
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        rewards.append(sum(scores) / len(scores))
        return scores

    return reward_batch


def trainer_for(args: argparse.Namespace, clock: StepClock, rewards: list[float]) -> GRPOTrainer:
    module, _, function = args.reward.partition(":")
    rows = [json.loads(line) for line in args.dataset.read_text().splitlines()]
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    samples = args.prompts_per_step * args.group_size
    config = GRPOConfig(
        output_dir=str(args.output.parent / "trl"),
        use_cpu=True,
        bf16=False,  # compute in the model's own dtype; autocast on top is slower
        max_steps=args.warmup_steps + args.num_steps,
        per_device_train_batch_size=samples // args.num_micro_batches,
        gradient_accumulation_steps=args.num_micro_batches,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        use_transformers_continuous_batching=args.generation == "continuous",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        seed=args.seed,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        # AutoTokenizer would rebuild parts of tokenizer.json, which tasuki reads as it is.
        processing_class=PreTrainedTokenizerFast.from_pretrained(args.model, padding_side="left"),
        reward_funcs=batched(
            getattr(importlib.import_module(module), function), rewards, fields=[name for name in rows[0] if name != "prompt"]
        ),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--reward", required=True, help="module:function")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--generation", choices=("static", "continuous"), required=True)
    parser.add_argument("--num-micro-batches", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, str(Path.cwd()))
    clock, rewards = StepClock(), []
    trainer_for(args, clock, rewards).train()
    args.output.write_text(
        json.dumps({"seconds": clock.seconds[args.warmup_steps :], "mean_rewards": rewards[args.warmup_steps :]})
    )


if __name__ == "__main__":
    main()
