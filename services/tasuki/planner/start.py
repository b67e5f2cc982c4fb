"""Whether trainer and engine start at the same time, or the trainer once the engine sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tasuki.planner.layout import Layout, Part, Strategy
from tasuki.planner.plan import parts_on_gpu, sizes_of
from tasuki.planner.step_bytes import training_peak
from tasuki.wire.stages import Phase

MEASURED_FREE = 0.03
"""Most of the free memory that SGLang leaves when it checks the cache whose tokens are planned (rollout/arguments.py)."""
TRIAL_TOKENS = 67
"""Completion tokens of each sequence in the passes that a trainer compiles at its start: a prime."""


def starts_together(layout: Layout) -> bool:
    """Whether the services share no GPU, or every GPU holds both at their largest during a start.

    False where the engine sizes its cache by the memory that is free, and for a base that the engine loads for both; always true
    otherwise on a CPU.
    """
    if layout.device == "cpu" or layout.shares_base or layout.strategy is not Strategy.STAGED:
        return layout.device == "cpu" and not layout.shares_base
    shared = [gpu for gpu in range(layout.num_gpus) if layout.has_rank(gpu) and layout.has_engine(gpu)]
    if not shared:
        return True
    if layout.kv_tokens is None:
        return False
    room = layout.gpu_bytes * (1 - MEASURED_FREE) - layout.overheads.margin
    return all(sum(parts_at_start(layout, gpu).values()) <= room for gpu in shared)


def parts_at_start(layout: Layout, gpu: int) -> Mapping[Part, int]:
    """Bytes on one GPU when both services are at the largest of their first start. A trainer that starts again replays steps."""
    # No step has run: the trainer computes at most the passes that it compiles.
    trial = replace(layout, micro_batch_tokens=(1 + TRIAL_TOKENS) * layout.sequence_parallel)
    sizes = replace(sizes_of(layout), work=training_peak(trial))
    both = replace(layout, strategy=Strategy.RESIDENT, staying=None, export_stays=True)
    return parts_on_gpu(both, sizes, Phase.TRAIN, gpu)
