"""Settings common to RL and supervised runs, and the check that learning-rate schedules last as long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import ScheduleConfig
from tasuki.wire.errors import InvalidArgument


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
    keep_optimizer: bool = False
    stop_at_eval_score: float | None = None


def check_schedules(config: NodeConfig, run: RunSettings) -> None:
    """Raises InvalidArgument if a schedule ends before the run: the remaining steps would have a learning rate of 0."""
    waits = 0 if config.train is None else config.train.critic_warmup_steps
    _check("trainer", config.trainer, run.num_steps - waits, run)
    if config.trainer.critic is not None and config.train is not None:
        _check("trainer.critic", config.trainer.critic, run.num_steps, run)


def _check(table: str, optimizer: ScheduleConfig, num_steps: int, run: RunSettings) -> None:
    total = optimizer.total_steps
    if optimizer.lr_schedule == "constant" or total is None or total >= num_steps:
        return
    problem = (
        f"is {total}, after which the rate of the {optimizer.lr_schedule} schedule is 0, and the run has {num_steps} steps"
    )
    raise InvalidArgument(f"{table}.total_steps", f"{problem}; raise it to {num_steps}, or lower {run.length_key}")
