"""The table of supervised fine-tuning: `[sft]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt, model_validator

from tasuki.algorithms.effects import check_evaluation
from tasuki.config.table import Schema, Seed


class SftConfig(Schema):
    """Supervised fine-tuning by `tasuki train`, in place of `[train]`."""

    dataset: Path
    """JSONL; each line an object with `messages`, a chat, or with `prompt` and `completion`."""
    eval_dataset: Path | None = None
    """Held-out lines of the same form."""
    output_dir: Path
    num_steps: PositiveInt | None = None
    """Optimizer steps; by default as many as `num_epochs` takes."""
    num_epochs: PositiveInt | None = None
    """Passes over the dataset, in place of `num_steps`; 1 by default."""
    samples_per_step: PositiveInt = 32
    max_tokens: PositiveInt | None = None
    """Most tokens of a line, prompt and completion together; a longer one is refused. By default the smaller one of the model's context
    length and `trainer.micro_batch_tokens`, which is also the upper bound."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How the losses of tokens become one number (docs/algorithms.md)."""
    eval_every: PositiveInt | None = None
    """Steps between held-out losses; the first and the last step always have one when there is an eval_dataset."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints, from which `tasuki train --resume` goes on; none by default."""
    seed: Seed = 0
    """Of the order of the lines."""

    @model_validator(mode="after")
    def _fits_the_loop(self) -> SftConfig:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError("give num_steps or num_epochs, not both")
        check_evaluation(
            has_prompts=self.eval_dataset is not None,
            needed="nothing is held out; give an eval_dataset",
            eval_every=self.eval_every,
        )
        return self
