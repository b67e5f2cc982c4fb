"""Share of held-out problems that a model folder solves greedily in plain transformers, without tasuki."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_SIZE = 64


def score(folder: Path, problems: Path, *, reward: str, max_new_tokens: int, device: str) -> float:
    """reward: name of a function in rewards.py."""
    rewarded = getattr(importlib.import_module("rewards"), reward)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device)
    rows = [json.loads(line) for line in problems.open()]
    scores: list[float] = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(device)
        made = model.generate(**prompts, do_sample=False, max_new_tokens=max_new_tokens)
        texts = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        scores += [rewarded(completion=text, answer=row["answer"]) for text, row in zip(texts, batch, strict=True)]
    return sum(scores) / len(scores)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path, help="JSONL of `prompt` and `answer`")
    parser.add_argument("--reward", default="exact", choices=["exact", "gsm8k_exact"])
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = {"reward": arguments.reward, "max_new_tokens": arguments.max_new_tokens, "device": arguments.device}
    print(score(arguments.model, arguments.problems, **options))
