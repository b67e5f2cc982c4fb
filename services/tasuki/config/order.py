"""What a node's settings must be to each other: deadlines in their order, and what only one kind of device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasuki.config.schema import NodeConfig

HEARTBEAT_S = 0.25
"""A process shows so often that it lives."""
_MISSED_BEATS = 4
# Each is the time in which what the first deadline is for must have been noticed, before the second gives up. docs/changeover.md has all.
_NOT_BELOW = (
    ("restart.progress_s", "restart.stall_s"),
    ("coordinator.stage_timeout_s", "restart.progress_s"),
    ("coordinator.stage_timeout_s", "trainer.collective_timeout_s"),
    ("coordinator.recovery_timeout_s", "coordinator.stage_timeout_s"),
    ("coordinator.recovery_timeout_s", "rollout.start_timeout_s"),
)


class Misfit(ValueError):
    """Two settings that do not go together. `field` is the one to change first."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def raise_misfits(config: NodeConfig) -> None:
    """Raises Misfit naming both settings."""
    shortest = _MISSED_BEATS * HEARTBEAT_S
    if config.restart.stall_s < shortest:
        problem = f"= {config.restart.stall_s:g} must be at least {shortest:g}: a heartbeat comes every {HEARTBEAT_S:g} s"
        raise Misfit("restart.stall_s", problem)
    for later, sooner in _NOT_BELOW:
        if _value(config, later) < _value(config, sooner):
            problem = f"= {_value(config, later):g} must not be below {sooner} = {_value(config, sooner):g}"
            raise Misfit(later, f"{problem}: raise the one or lower the other")
    if config.device == "cuda" and config.rollout.dtype == "float32":
        raise Misfit(
            "rollout.dtype",
            '= "float32" is not possible with device = "cuda", where SGLang\'s kernels take bfloat16: leave it out',
        )
    if config.device == "cuda" and config.memory.host_budget_bytes is not None:
        raise Misfit("memory.host_budget_bytes", 'is for device = "cpu"; the memory of a GPU is measured')


def _value(config: NodeConfig, key: str) -> float:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)
