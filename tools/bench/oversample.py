"""Time that carried groups save on completions of heavy-tailed lengths: `python -m tools.bench.oversample [--seeds 0 1 2] [--out FOLDER]`.

--gpu: a shape of 1.5 billion parameters, median 256, at most 8,192 tokens.

A prompt is a word and a number, from which the policy counts down in red or in blue: lengths belong to the row and not to the policy, and
are lognormal, at most 32 x their median. Each word has one right colour, which only the reward tells. Counting is in the first weights.
Each run has its own node. Positions are the tokens, one after another, that a step waits for, those that pass during the drain included.
Trained tokens a second are those of whole steps without the first three. "held" is the seconds for which rollout holds the devices, "busy"
the share of them in which the GPU's driver saw a kernel. Writes oversample.json and oversample.png, and prints a table.
"""

import argparse
import json
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
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
from tasuki.config.paths import journal_path, node_targets
from tasuki.node.start import running_node
from tasuki.runs.tokenizer import ModelTokenizer

OVERSAMPLE, WARM_UP = (1.0, 1.25, 1.5), 3
METRICS = ("staleness", "dropped_groups")
NUM_TRAIN, NUM_WORDS, SPECIAL = 4096, 64, ("<pad>", "<eos>", "<unk>")
FIRST = len(SPECIAL) + NUM_WORDS
"""Id of the word for no number; those of the numbers follow, and then as many of each colour."""
REWARD = "def right(*, completion, color):\n    return float(completion.split()[0].startswith(color))\n"
CONFIG = """
state_dir = "node"
device = "{device}"
model.path = "{folder}/model"
seed = {seed}
{services}
[train]
dataset = "{folder}/train.jsonl"
eval_dataset = "{folder}/eval.jsonl"
output_dir = "{output}"
num_steps = {num_steps}
prompts_per_step = {prompts}
group_size = {group}
max_new_tokens = {longest}
eval_every = {eval_every}
oversample = {oversample}
max_staleness = {staleness}
reward.function = "reward:right"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Lengths, steps and the model's shape."""

    device: str
    median: int
    sigma: float
    longest: int
    num_eval: int
    prompts: int
    group: int
    max_staleness: int
    num_steps: tuple[int, ...]
    """By value of OVERSAMPLE; none if 0."""
    eval_every: int
    hidden: int
    model: Mapping[str, Any]
    services: str

    @property
    def vocabulary(self) -> list[str]:
        numbers = range(self.longest)
        return [
            *SPECIAL,
            *(f"w{word}" for word in range(NUM_WORDS)),
            *(f"{of}{each}" for of in ("c", "red", "blue") for each in numbers),
        ]


SMALL = Size(
    device="cpu", median=16, sigma=0.8, longest=512, num_eval=128, prompts=16, group=4, max_staleness=6, num_steps=(60, 60, 60),
    eval_every=5, hidden=64,
    model={"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1664},
    services="""trainer = { num_ranks = 1, learning_rate = 5e-4, betas = [0.9, 0.95], compute_dtype = "float32" }

[rollout]
dtype = "float32"
context_length = 640
max_running_requests = 256
engine = { disable_radix_cache = true, max_total_tokens = 131072 }
""",
)  # fmt: skip
ON_GPU = Size(
    device="cuda", median=256, sigma=1.2, longest=8192, num_eval=64, prompts=32, group=8, max_staleness=16, num_steps=(9, 0, 22),
    eval_every=100, hidden=1536,
    model={"intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
    services="""trainer = { num_ranks = 1, learning_rate = 1e-6, micro_batch_tokens = 16384 }

[rollout]
context_length = 8320
engine = { attention_backend = "triton", sampling_backend = "pytorch" }
""",
)  # fmt: skip


def make_task(folder: Path, size: Size, *, seed: int) -> None:
    """Writes model/, train.jsonl and eval.jsonl. Held-out rows have lengths of the median."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    colors = draw.permutation(["red", "blue"] * (NUM_WORDS // 2))
    lengths = np.rint(size.median * np.exp(size.sigma * draw.standard_normal(NUM_TRAIN)))
    counts = np.clip(lengths, 2, size.longest).astype(int) - 1
    for name, some in (("eval", [size.median - 1] * size.num_eval), ("train", counts)):
        words = draw.integers(NUM_WORDS, size=len(some))
        rows = ({"prompt": f"w{word} c{count}", "color": colors[word]} for word, count in zip(words, some, strict=True))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {word: index for index, word in enumerate(size.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    counting_model(size).save_pretrained(folder / "model")


def counting_model(size: Size) -> Qwen2ForCausalLM:
    """A model that counts down, in the colour it has begun with; at first it draws either. Its layers change little."""
    longest = size.longest
    config = Qwen2Config(
        hidden_size=size.hidden, max_position_embeddings=2 * longest, tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, **size.model,
    )  # fmt: skip
    with torch.device(size.device):
        model = Qwen2ForCausalLM(config)
        codes, color = functional.normalize(torch.randn(longest, size.hidden), dim=1), torch.zeros(size.hidden)
    codes[:, 0], color[0] = 0.0, 1.0
    with torch.no_grad():
        if size.device == "cuda":
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(0.01)
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        embed[FIRST : FIRST + longest] = 4 * codes
        head[1] = 6 * codes[0]
        for place, sign in ((1, 1.0), (2, -1.0)):
            first = FIRST + place * longest
            embed[first : first + longest] = 4 * codes + 2 * sign * color
            head[first : first + longest - 1] = 6 * codes[1:] + 2 * sign * color
    return model.to(torch.bfloat16) if size.device == "cuda" else model


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
    tokens: list[int] = field(default_factory=list)
    """Trained in each step, prompts included."""
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
        self.tokens.append(sum(lengths) + sum(len(sample.prompt_token_ids) for sample in samples))
        return groups


class Watched(threading.Thread):
    """Samples of whether the GPU ran a kernel, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._ends = threading.Event()

    def run(self) -> None:
        nvml: Any = pynvml
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        while not self._ends.wait(0.05):
            self.samples.append((time.time(), nvml.nvmlDeviceGetUtilizationRates(gpu).gpu))

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def busy(self, holds: Sequence[tuple[float, float]]) -> float:
        return float(np.mean([share for at, share in self.samples if any(begin <= at < end for begin, end in holds)])) / 100


def holds_of(state_dir: Path) -> list[tuple[float, float]]:
    """When rollout held the devices: from the end of a changeover to the start of the next."""
    with closing(sqlite3.connect(journal_path(state_dir))) as journal:
        query = "SELECT target, start_time, seconds FROM changeovers JOIN outcomes USING (number) WHERE status = 'DONE' ORDER BY number"
        rows = journal.execute(query).fetchall()
    return [(start + seconds, later[1]) for (target, start, seconds), later in pairwise(rows) if target == "ROLLOUT"]


def run(folder: Path, size: Size, *, seed: int, oversample: float, num_steps: int) -> dict[str, Any]:
    output = folder / f"{oversample:g}"
    output.mkdir()
    staleness = size.max_staleness if oversample > 1 else 0
    settings = CONFIG.format(
        folder=folder, output=output, seed=seed, oversample=oversample, staleness=staleness, num_steps=num_steps,
        **{name: getattr(size, name) for name in ("device", "prompts", "group", "longest", "eval_every", "services")},
    )  # fmt: skip
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
        tokenizer, ends = ModelTokenizer(folder / "model"), list[float]()
        loop = Measured(client, Dataset(rows, seed=seed), held_out, tokenizer, rewards, config.train)

        def report(step: Step) -> None:
            steps.append(step)
            ends.append(time.time())

        watched = Watched()
        if size.device == "cuda":
            watched.start()
        loop.run(report)
        if size.device == "cuda":
            watched.stop()
        holds = [(begin, end) for begin, end in holds_of(config.state_dir) if ends[WARM_UP - 1] <= begin < ends[-2]]
    steady = slice(WARM_UP, num_steps)
    figures: dict[str, Any] = {name: float(np.mean([step.metrics.get(name, 0.0) for step in steps[:-1]])) for name in METRICS}
    return figures | {
        "seed": seed, "oversample": oversample, "positions": loop.positions,
        "tokens_per_s": sum(loop.tokens[steady]) / (ends[num_steps - 1] - ends[WARM_UP - 1]),
        "held": sum(end - begin for begin, end in holds), "busy": watched.busy(holds) if watched.samples else None,
        "step_s": np.diff(ends[:num_steps]).round(3).tolist(), "seconds": [step.seconds for step in steps[:-1]],
        "tokens": loop.tokens, "gap": [step.metrics.get("log_prob_gap", 0.0) for step in steps[:-1]],
        "generate_s": [step.seconds["generate"] for step in steps[:-1]],
        "scores": [(step.step, step.eval_score) for step in steps if step.eval_score is not None],
        "mean_length": float(np.mean(loop.lengths)), "as_row": loop.num_as_row / len(loop.lengths),
        "carried": sum(step.metrics.get("carried_tokens", 0.0) for step in steps) / sum(loop.lengths),
    }  # fmt: skip


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib.figure  # which a GPU node need not have

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
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    size, results = ON_GPU if arguments.gpu else SMALL, list[dict[str, Any]]()
    print(
        "seed oversample positions generate_s tokens_per_s score   length   as_row  carried staleness dropped   held_s     busy"
    )
    for seed in arguments.seeds:
        folder = (arguments.out / f"oversample-{seed}").absolute()
        make_task(folder, size, seed=seed)
        for oversample, num_steps in zip(OVERSAMPLE, size.num_steps, strict=True):
            if not num_steps:
                continue
            one = run(folder, size, seed=seed, oversample=oversample, num_steps=num_steps)
            results.append(one)
            (arguments.out / "oversample.json").write_text(json.dumps(results) + "\n")
            figures = [one[name] for name in ("mean_length", "as_row", "carried", *METRICS, "held")]
            row = np.mean(one["positions"]), np.mean(one["generate_s"]), one["tokens_per_s"], one["scores"][-1][1], *figures
            print(
                f"{seed:4d} {oversample:10g} {row[0]:9.1f}", *(f"{number:8.3f}" for number in row[1:]), one["busy"], flush=True
            )
    draw(results, arguments.out / "oversample.png")


if __name__ == "__main__":
    main()
