"""Share of held-out problems that a model folder solves greedily in plain transformers, with tasuki's tokenizer."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import TasukiError

BATCH_SIZE = 64


class Refused(Exception):
    """An argument that names nothing usable."""


def score(folder: Path, problems: Path, *, reward: str, max_new_tokens: int, device: str) -> float:
    """reward: name of a function in rewards.py. Raises Refused."""
    rewarded = getattr(importlib.import_module("rewards"), reward)
    rows = read_problems(problems)
    tokenizer, model = load(folder)
    model.to(device)
    scores: list[float] = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        prompts = [torch.tensor(tokenizer.encode_prompt(row["prompt"])) for row in batch]
        padded, mask = (
            pad_sequence(each, batch_first=True, padding_side="left").to(device)
            for each in (prompts, [*map(torch.ones_like, prompts)])
        )
        made = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
        texts = [tokenizer.decode(token_ids.cpu().numpy()) for token_ids in made[:, padded.shape[1] :]]
        scores += [rewarded(completion=text, answer=row["answer"]) for text, row in zip(texts, batch, strict=True)]
    return sum(scores) / len(scores)


def read_problems(path: Path) -> list[dict[str, Any]]:
    advice = "give a JSONL file of `prompt`, a list of chat messages, and `answer`, as make_task.py writes it"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise Refused(f"problems: {path} cannot be read: {error}; {advice}") from error
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("prompt"), list) and "answer" in row for row in rows):
        raise Refused(f"problems: {path} lacks problems, or parts of them; {advice}")
    return rows


def load(folder: Path) -> tuple[ModelTokenizer, Any]:
    """Tokenizer and model. Never takes the folder's name for that of a model on the network."""
    advice = "give a folder with config.json, weights, and a tokenizer that has a chat template"
    try:
        if not (folder / "config.json").is_file():
            raise Refused(f"model: {folder} is not a model's folder; {advice}")
        tokenizer = ModelTokenizer(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError, KeyError, SafetensorError, TasukiError) as error:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Refused(f"model: {folder} cannot be loaded: {problem}; {advice}") from error
    return tokenizer, model


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
    try:
        print(score(arguments.model, arguments.problems, **options))
    except (Refused, TasukiError) as error:
        parser.exit(2, f"score.py: {error}\n")
