"""Checks that the node's learning-rate schedules last as long as the run."""

from __future__ import annotations

from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.runs.settings import RunSettings
from tasuki.wire.errors import InvalidArgument


def check_schedules(config: NodeConfig, run: RunSettings) -> None:
    """Raises InvalidArgument if a schedule ends before the run: the remaining steps would have a learning rate of 0."""
    waits = 0 if config.train is None else config.train.critic_warmup_steps
    _check("trainer", config.trainer, run.num_steps - waits, run)
    if config.trainer.critic is not None and config.train is not None:
        _check("trainer.critic", config.trainer.critic, run.num_steps, run)


def _check(table: str, optimizer: OptimizerConfig, num_steps: int, run: RunSettings) -> None:
    total = optimizer.total_steps
    if optimizer.lr_schedule == "constant" or total is None or total >= num_steps:
        return
    problem = (
        f"is {total}, after which the rate of the {optimizer.lr_schedule} schedule is 0, and the run has {num_steps} steps"
    )
    raise InvalidArgument(f"{table}.total_steps", f"{problem}; raise it to {num_steps}, or lower {run.length_key}")
