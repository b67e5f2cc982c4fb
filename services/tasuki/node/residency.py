"""Residency of a node: decided once, by the planner, before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tasuki.config.gpus import smallest_gpu_bytes
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner.advice import problems
from tasuki.planner.layout import Layout
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import check_kv_tokens, check_sequence, node_layout
from tasuki.planner.plan import plan
from tasuki.planner.residency import as_config, stay_and_leave
from tasuki.planner.start import starts_together

# Unused on a CPU, but the planner requires a GPU size.
_NO_GPU = 1


def with_residency(config: NodeConfig, *, resumes: bool, tell: Callable[[str], None]) -> NodeConfig:
    """Adds `[residency]` as the planner decides, unless it is configured.

    tell: takes one line for each kind of device, and one if the node does not fit into the memory that is free now.

    resumes: the trainer replays the steps of its log at the start, which needs the memory of a step.

    If the GPUs' size is unknown, nothing stays. Raises InvalidArgument if `rollout.kv_tokens` does not fit, or the cache cannot hold one
    sequence.
    """
    gpu_bytes = _NO_GPU if config.device == "cpu" else smallest_gpu_bytes()
    if gpu_bytes is None:
        tell("NVML does not report the GPUs' memory: all memory leaves at each changeover unless [residency] says what stays")
        return config
    budget = config.memory.host_budget_bytes
    host_bytes = host_memory().available_bytes if budget is None else budget
    layout = node_layout(config, read_model_shape(config.model.path), gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    # Tokens of a given residency were planned, perhaps for GPUs that appear a little larger.
    if config.residency is not None and config.residency.kv_tokens is None:
        check_kv_tokens(layout, config)
    check_sequence(layout)
    for line in residency_lines(layout):
        tell(line)
    planned = plan(replace(layout, host_bytes=host_memory().available_bytes))
    if not planned.fits:
        tell(f"the plan does not fit: {'; '.join(problems(planned))}; `tasuki plan CONFIG` shows what to change")
    if config.residency is not None:
        return config
    is_counted = config.device == "cuda" and layout.kv_tokens is not None
    kv_tokens = planned.kv_pool.num_tokens if is_counted else None
    together = not resumes and starts_together(layout)
    if together:
        tell("trainer and rollout start at the same time: every GPU has room for both")
    residency = as_config(layout, config, kv_tokens=kv_tokens, starts_together=together)
    return config.model_copy(update={"residency": residency})


def residency_lines(layout: Layout) -> list[str]:
    """Tags that stay and leave, one line for each kind of GPU."""
    return [
        f"{name}: keeps {', '.join(stays) or 'nothing'}; releases {', '.join(leaves) or 'nothing'}"
        for name, stays, leaves in stay_and_leave(layout)
    ]
