"""Settings common to RL and supervised runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    table: str
    """Table in the configuration: "train" or "sft"."""
    output_dir: Path
    num_steps: int
    length_key: str
    """Key that determines num_steps: "train.num_steps", "sft.num_epochs"."""
    rows_per_step: int
    save_every: int | None
    stop_at_eval_score: float | None = None
