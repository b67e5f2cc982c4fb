"""The supervised run of an [sft] table: its training, summary and curve."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from tasuki.client.dataset import Dataset
from tasuki.client.progress import Progress
from tasuki.client.sft_data import read_sft_jsonl
from tasuki.client.sft_loop import SftLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import TrainingSample
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import SftConfig
from tasuki.models.known import read_model_shape
from tasuki.node.model_folder import check_model_folders
from tasuki.runs.folder import draw_curves
from tasuki.runs.recipe import RunSettings, field_as_key
from tasuki.runs.resume import Continuation, MakeLoop
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument


def summarize_sft(
    steps: Sequence[Step], *, seed: int, seconds: float, changeovers: int, policy_version: int
) -> dict[str, object]:
    """Losses are in nats per token; None if not measured."""
    held_out, losses, num_tokens = (
        [step.metrics[name] for step in steps if name in step.metrics] for name in ("eval/loss", "loss", "num_tokens")
    )
    return {
        "eval_loss_before": held_out[0] if held_out else None,
        "eval_loss_after": held_out[-1] if held_out else None,
        "loss_last": losses[-1] if losses else None,
        "seconds": round(seconds, 1),
        "steps": sum(not step.is_evaluation for step in steps),
        "num_tokens": int(sum(num_tokens)),
        "changeovers": changeovers,
        "seed": seed,
        "policy_version": policy_version,
    }


def draw_sft_curve(output_dir: Path, steps: Sequence[Step]) -> None:
    """Losses above, gradient norm below."""
    losses = [
        ("batch", "tab:blue", "", lambda step: step.metrics.get("loss")),
        ("held-out", "tab:orange", "o", lambda step: step.metrics.get("eval/loss")),
    ]
    norm = [("before clipping", "tab:gray", "", lambda step: step.grad_norm)]
    draw_curves(output_dir, steps, ("loss", losses), ("gradient norm", norm))


@dataclass(frozen=True, slots=True)
class SftTraining:
    """Trains on examples."""

    sft: SftConfig
    samples: Sequence[TrainingSample]
    eval_samples: Sequence[TrainingSample]
    seed: int
    tokenizer: ModelTokenizer
    doubts: Sequence[str] = ()
    """What is likely wrong with the run."""

    @property
    def now(self) -> datetime:
        return self.tokenizer.now

    @property
    def settings(self) -> RunSettings:
        sft = self.sft
        num_steps, key = sft.num_steps, "num_steps"
        if num_steps is None:
            num_steps, key = math.ceil((sft.num_epochs or 1) * len(self.samples) / sft.samples_per_step), "num_epochs"
        return RunSettings.of(sft, num_steps=num_steps, length_key=key)

    @property
    def eval_every(self) -> int | None:
        return self.sft.eval_every or self.settings.num_steps if self.eval_samples else None

    @property
    def longest_sample(self) -> int:
        samples = [*self.samples, *self.eval_samples]
        more = [self.tokenizer.num_image_tokens(sample.images) for sample in samples]
        given = [len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in samples]
        return max(map(sum, zip(given, more, strict=True)))

    def dataset(self) -> Dataset[TrainingSample]:
        return Dataset(self.samples, seed=self.seed)

    @contextmanager
    def opened(self, folders: Sequence[Path], *, save_now: Callable[[], bool], progress: Progress) -> Iterator[MakeLoop]:
        def loop(client: Client, dataset: Dataset[TrainingSample], start: Continuation) -> SftLoop:
            return SftLoop(client, dataset, self.eval_samples, self.sft, self.settings.num_steps, save_now, progress)

        yield loop

    summarize = staticmethod(summarize_sft)
    draw = staticmethod(draw_sft_curve)


def read_sft(config: NodeConfig, sft: SftConfig, *, now: datetime | None = None) -> SftTraining:
    """now: as of ModelTokenizer. Raises InvalidArgument or PathNotFound, naming the key, the file and the line."""
    check_model_folders(config)
    max_tokens = _max_tokens(config, sft)
    tokenizer = ModelTokenizer(config.model.path, now=now)
    read = partial(read_sft_jsonl, tokenizer=tokenizer, max_tokens=max_tokens, columns=sft.columns)
    with field_as_key("dataset", "sft.dataset"):
        samples = read(sft.dataset)
    with field_as_key("dataset", "sft.eval_dataset"):
        eval_samples = [] if sft.eval_dataset is None else read(sft.eval_dataset)
    stops = np.array(tokenizer.stop_token_ids, dtype=np.int32)
    ends = [np.isin(sample.completion_token_ids[sample.loss_mask == 1], stops).any() for sample in samples]
    doubts: list[str] = []
    if num_endless := len(ends) - sum(ends):
        known = ", ".join(repr(tokenizer.decode_whole(stops[at : at + 1])) for at in range(len(stops))) or "none"
        problem = (
            f"{num_endless:,} of {len(ends):,} rows of {sft.dataset} teach no stop token ({known}), so answers will not end"
        )
        doubts = [f"{problem}; take the chat template and eos_token_id that belong together"]
    if tokenizer.num_rewritten:
        problem = f"the chat template changes or leaves out learned text in {tokenizer.num_rewritten:,} rows, such as earlier thoughts"
        doubts.append(f"{problem}; what it writes is learned")
    return SftTraining(sft, samples, eval_samples, config.seed, tokenizer, doubts)


def _max_tokens(config: NodeConfig, sft: SftConfig) -> int:
    """Maximum tokens of a sample. Rollout's context length does not matter: nothing is generated."""
    context, budget = read_model_shape(config.model.path).context_length, config.most_micro_batch_tokens
    limit, name = min((context, "the model's context length"), (budget, "trainer.micro_batch_tokens"))
    if sft.max_tokens is not None and sft.max_tokens > limit:
        raise InvalidArgument("sft.max_tokens", f"is {sft.max_tokens}, above {name} of {limit}; lower it")
    return limit if sft.max_tokens is None else sft.max_tokens
