"""The table of supervised fine-tuning: `[sft]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt, model_validator

from tasuki.config.table import Schema, Seed


class SftConfig(Schema):
    """Supervised fine-tuning with `tasuki train`, instead of `[train]`."""

    dataset: Path
    """JSONL file; each line is an object with `messages`, a chat, or with `prompt` and `completion`."""
    eval_dataset: Path | None = None
    """Held-out lines in the same format."""
    output_dir: Path
    num_steps: PositiveInt | None = None
    """Number of optimizer steps; by default that of `num_epochs`."""
    num_epochs: PositiveInt | None = None
    """Passes over the dataset, instead of `num_steps`; default 1."""
    samples_per_step: PositiveInt = 32
    max_tokens: PositiveInt | None = None
    """Maximum tokens of a line, prompt plus completion; longer lines are refused. Defaults to its upper bound, the smaller of the model's
    context length and `trainer.micro_batch_tokens`."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How token losses are reduced to one number (docs/algorithms.md)."""
    eval_every: PositiveInt | None = None
    """Steps between held-out losses. With an eval_dataset, they are always computed for the first and last steps."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints for `tasuki train --resume`; none by default."""
    seed: Seed = 0
    """Seed of the order of lines."""

    @model_validator(mode="after")
    def _fits_the_loop(self) -> SftConfig:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError("give num_steps or num_epochs, not both")
        return self
