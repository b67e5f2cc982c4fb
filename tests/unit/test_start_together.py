"""Parallel start of trainer and engine: only if each GPU can hold both, whenever SGLang measures free memory."""

from dataclasses import replace
from typing import Any

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.planner.choose import choices_of, parts_at_start, starts_together
from tasuki.planner.node import GB, Node, Part
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.rollout.arguments import _PLANNED_FRACTION
from tasuki.wire.stages import Phase
from tests.planned import chosen_node

MODEL = MODELS["qwen2.5-7b"]


def node(**tables: Any) -> NodeConfig:
    given = {"state_dir": "s", "device": "cuda", "model": {"path": "m"}}
    trainer = {"num_ranks": 2, **tables.pop("trainer", {})}
    rollout = {"context_length": 4096, "engine": {"max_total_tokens": 400_000}, **tables.pop("rollout", {})}
    return NodeConfig.model_validate(given | {"trainer": trainer, "rollout": rollout} | tables)


def h200s(config: NodeConfig, *, gpu_bytes: int = 141 * GB) -> Node:
    return chosen_node(config, MODEL, gpu_bytes=gpu_bytes)


def test_both_start_at_once_where_the_planned_cache_and_the_trainers_state_fit() -> None:
    assert starts_together(h200s(node()))
    assert not starts_together(h200s(node(rollout={"engine": {"max_total_tokens": 1_000_000}})))
    assert not starts_together(h200s(node(), gpu_bytes=80 * GB))


def test_the_trainer_waits_where_the_engine_sizes_its_cache_or_loads_for_both() -> None:
    most = node(rollout={"engine": {}})
    assert not starts_together(h200s(most))
    assert not starts_together(replace(h200s(node()), shares_base=True))
    on_cpu = h200s(node(device="cpu"))
    assert starts_together(on_cpu) and not starts_together(replace(on_cpu, shares_base=True))


def test_services_on_gpus_of_their_own_start_at_once_however_full_these_are() -> None:
    apart = {"trainer": {"devices": ["0", "1"]}, "rollout": {"devices": ["2", "3"], "engine": {}}}
    assert starts_together(h200s(node(**apart), gpu_bytes=90 * GB))


@pytest.mark.parametrize("gpu_bytes", range(60 * GB, 200 * GB, 10 * GB))
def test_sglang_finds_room_for_the_planned_cache_whenever_it_looks(gpu_bytes: int) -> None:
    """SGLang takes the memory free after its weights, minus a share of that before, and silently serves fewer tokens than asked."""
    layout = h200s(node(), gpu_bytes=gpu_bytes)
    if not starts_together(layout):
        return
    parts = parts_at_start(layout, 0)
    after_weights = gpu_bytes - sum(size for part, size in parts.items() if part not in (Part.KV_CACHE, Part.CUDA_GRAPH))
    before_weights = gpu_bytes  # before the trainer begins, SGLang's share is largest
    assert after_weights - (1 - _PLANNED_FRACTION) * before_weights >= parts[Part.KV_CACHE]


def test_a_start_counts_all_of_both_but_the_memory_of_a_step() -> None:
    layout = h200s(node())
    at_start, step = parts_at_start(layout, 0), plan(layout).stage(Phase.TRAIN).gpus[0]
    both = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.EXPORT)
    assert {*both, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.CUDA_GRAPH, Part.CONTEXTS, Part.WHOLE_GRADIENTS} <= at_start.keys()
    assert all(at_start[part] == step[part] for part in both if part in step)
    assert at_start[Part.ACTIVATIONS] < step[Part.ACTIVATIONS] / 10


def test_a_trainer_that_replays_steps_waits_for_the_engine() -> None:
    config = node()
    together = [choices_of(h200s(config), resumes=resumes).starts_together for resumes in (False, True)]
    assert together == [True, False]
