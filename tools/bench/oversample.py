"""Time that carried groups save on completions of heavy-tailed lengths: `python -m tools.bench.oversample [--seeds 0 1 2] [--out FOLDER]`.

A prompt is a word and a number, from which the policy counts down in red or in blue: lengths belong to the row and not to the policy, and
are lognormal, at most 32 x their median. Each word has one right colour, which only the reward tells. Counting is in the first weights.
Each run has its own node on a CPU. Positions are the tokens, one after another, that a step waits for, those that pass during the drain
included. Writes oversample.json and oversample.png, and prints a table.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tasuki.client.carry import CarriedGroup, Carry
from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.estimation import Group
from tasuki.client.rewards import RewardPool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.shown_samples import ShownSamples
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.load import load_config
from tasuki.config.paths import node_targets
from tasuki.node.start import running_node
from tasuki.runs.tokenizer import ModelTokenizer

MEDIAN, SIGMA, LONGEST, NUM_WORDS = 16, 0.8, 32 * 16, 64
NUM_EVAL, NUM_TRAIN, SIZE = 128, 4096, 64
OVERSAMPLE, MAX_STALENESS = (1.0, 1.25, 1.5), 6
METRICS = ("staleness", "dropped_groups")
PROMPT = [
    "<pad>",
    "<eos>",
    "<unk>",
    *(f"w{number}" for number in range(NUM_WORDS)),
    *(f"c{number}" for number in range(LONGEST)),
]
VOCABULARY = [*PROMPT, *(f"{color}{number}" for color in ("red", "blue") for number in range(LONGEST))]
FIRST, RED, BLUE = (VOCABULARY.index(word) for word in ("c0", "red0", "blue0"))
REWARD = "def right(*, completion, color):\n    return float(completion.split()[0].startswith(color))\n"
CONFIG = """
state_dir = "node"
device = "cpu"
model.path = "{folder}/model"
seed = {seed}
trainer = {{ num_ranks = 1, learning_rate = 5e-4, betas = [0.9, 0.95], compute_dtype = "float32" }}

[rollout]
dtype = "float32"
context_length = 640
max_running_requests = 256
engine = {{ disable_radix_cache = true, max_total_tokens = 131072 }}

[train]
dataset = "{folder}/train.jsonl"
eval_dataset = "{folder}/eval.jsonl"
output_dir = "{output}"
num_steps = 60
prompts_per_step = 16
group_size = 4
max_new_tokens = 512
eval_every = 5
oversample = {oversample}
max_staleness = {staleness}
reward.function = "reward:right"
"""


def make_task(folder: Path, *, seed: int) -> None:
    """Writes model/, train.jsonl and eval.jsonl. Held-out rows have lengths of the median."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    colors = draw.permutation(["red", "blue"] * (NUM_WORDS // 2))
    counts = np.clip(np.rint(MEDIAN * np.exp(SIGMA * draw.standard_normal(NUM_TRAIN))), 2, LONGEST).astype(int) - 1
    for name, some in (("eval", [MEDIAN - 1] * NUM_EVAL), ("train", counts)):
        words = draw.integers(NUM_WORDS, size=len(some))
        rows = ({"prompt": f"w{word} c{count}", "color": colors[word]} for word, count in zip(words, some, strict=True))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    counting_model().save_pretrained(folder / "model")


def counting_model() -> Qwen2ForCausalLM:
    """A model that counts down, in the colour it has begun with; at first it draws either."""
    config = Qwen2Config(
        vocab_size=-(-len(VOCABULARY) // 64) * 64, hidden_size=SIZE, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    codes, color = functional.normalize(torch.randn(LONGEST, SIZE), dim=1), torch.zeros(SIZE)
    codes[:, 0], color[0] = 0.0, 1.0
    with torch.no_grad():
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        embed[FIRST : FIRST + LONGEST] = 4 * codes
        head[1] = 6 * codes[0]
        for first, sign in ((RED, 1.0), (BLUE, -1.0)):
            embed[first : first + LONGEST] = 4 * codes + 2 * sign * color
            head[first : first + LONGEST - 1] = 6 * codes[1:] + 2 * sign * color
    return model


@dataclass(slots=True)
class MeasuredCarry(Carry):
    """Groups of which the longest way is measured that a sample has gone in a step."""

    positions: int = 0

    def take(self, *arguments: Any, **settings: Any) -> list[CarriedGroup]:
        before = [(sample, group.samples, place) for group in self.groups for place, sample in enumerate(group.samples)]
        taken = Carry.take(self, *arguments, **settings)
        self.positions = max(len(samples[place].token_ids) - len(sample.token_ids) for sample, samples, place in before)
        return taken


@dataclass(slots=True)
class Measured(RlLoop):
    """A run that notes what each step waited for and trained on."""

    carry: Carry = field(default_factory=MeasuredCarry)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_as_row: int = 0

    def sample_groups(self, step: Step, shown: ShownSamples) -> list[Group]:
        groups = RlLoop.sample_groups(self, step, shown)
        samples = [sample for group in groups for sample in group.samples]
        lengths = [len(sample.token_ids) for sample in samples]
        of_row = [int(np.asarray(sample.prompt_token_ids)[-1]) - FIRST + 1 for sample in samples]
        self.num_as_row += sum(length == own for length, own in zip(lengths, of_row, strict=True))
        assert isinstance(self.carry, MeasuredCarry)
        self.positions.append(self.carry.positions or max(lengths))
        self.lengths += lengths
        return groups


def run(folder: Path, *, seed: int, oversample: float) -> dict[str, Any]:
    output = folder / f"{oversample:g}"
    output.mkdir()
    staleness = MAX_STALENESS if oversample > 1 else 0
    settings = CONFIG.format(folder=folder, output=output, seed=seed, oversample=oversample, staleness=staleness)
    (output / "config.toml").write_text(settings)
    config, steps = load_config(output / "config.toml"), list[Step]()
    assert config.train is not None
    with (
        RewardPool("reward:right", folders=(folder,)) as rewards,
        running_node(config),
        Client(node_targets(config)["coordinator"]) as client,
    ):
        client.begin_run()
        rows, held_out = read_jsonl(folder / "train.jsonl"), read_jsonl(folder / "eval.jsonl")
        tokenizer = ModelTokenizer(folder / "model")
        loop = Measured(client, Dataset(rows, seed=seed), held_out, tokenizer, rewards, config.train)
        loop.run(steps.append)
    figures: dict[str, Any] = {name: float(np.mean([step.metrics.get(name, 0.0) for step in steps[:-1]])) for name in METRICS}
    return figures | {
        "seed": seed, "oversample": oversample, "positions": loop.positions,
        "generate_s": [step.seconds["generate"] for step in steps[:-1]],
        "scores": [(step.step, step.eval_score) for step in steps if step.eval_score is not None],
        "mean_length": float(np.mean(loop.lengths)), "as_row": loop.num_as_row / len(loop.lengths),
        "carried": sum(step.metrics.get("carried_tokens", 0.0) for step in steps) / sum(loop.lengths),
    }  # fmt: skip


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(9, 3.4), layout="constrained")
    by_step, by_position = figure.subplots(1, 2, sharey=True)
    for one in results:
        color = ("#555555", "#1f77b4", "#d62728")[OVERSAMPLE.index(one["oversample"])]
        places, scores = zip(*one["scores"], strict=True)
        waited = np.concatenate([[0], np.cumsum(one["positions"])])[list(places)]
        is_first = one["seed"] == results[0]["seed"]
        by_step.plot(places, scores, color=color, label=f"oversample = {one['oversample']:g}" if is_first else None)
        by_position.plot(waited, scores, color=color)
    by_step.set(xlabel="steps", ylabel="held-out score")
    by_position.set(xlabel="token positions that steps waited for")
    by_step.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("seed oversample positions generate_s score   length   as_row  carried staleness dropped")
    for seed in arguments.seeds:
        folder = (arguments.out / f"oversample-{seed}").absolute()
        make_task(folder, seed=seed)
        for oversample in OVERSAMPLE:
            one = run(folder, seed=seed, oversample=oversample)
            results.append(one)
            (arguments.out / "oversample.json").write_text(json.dumps(results) + "\n")
            figures = [one[name] for name in ("mean_length", "as_row", "carried", *METRICS)]
            row = np.mean(one["positions"]), np.mean(one["generate_s"]), one["scores"][-1][1], *figures
            print(f"{seed:4d} {oversample:10g} {row[0]:9.1f}", *(f"{number:8.3f}" for number in row[1:]), flush=True)
    draw(results, arguments.out / "oversample.png")


if __name__ == "__main__":
    main()
