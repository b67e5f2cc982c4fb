"""Extent of a run of tests: `make test` leaves out long files and samples long proofs, which `make test-all` and `make chaos` run whole."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, cycle, islice, product
from typing import Any

import pytest

IS_WHOLE = os.environ.get("TASUKI_PROOFS") == "whole"

_MINUTES = os.environ.get("TASUKI_PROOF_MINUTES")
_ENDS_AT = float("inf") if _MINUTES is None else time.monotonic() + 60 * float(_MINUTES)

_LONG = {
    "contract": ("generated_code wheel"),
    "e2e": (
        "arithmetic engine_metrics flat image_agents images megatron mixtures ppo residency resume secrets starting_points"
    ),
    "integration": (
        "adapter_steps certified_names checkpointing compiled_blocks critic_exactness dashboard_live dashboard_page exiting_processes "
        "expert_load expert_parallel fleet fleet_doctor fleet_rollout_front fleet_trainer fleet_trainer_front "
        "gloo_peers grpcurl hub journal_kills launch loss_curves loss_cuts many_changeovers megatron model_copy node_replicas "
        "megatron_lora node_restarts port_attacks port_reload port_roles port_server prefix_sharing prometheus quantized_adamw rank_store "
        "recorded_ahead reference_on_host replayed_steps replicas reward_processes "
        "gathered_layers old_policy_replay rollout_adapter router_replay rollout_great_calls rollout_images rollout_process "
        "rpc_faults streamed_adamw tracing trainer_critic trainer_lifetime trainer_lora trainings watchdog"
    ),
    "unit": ("deploy_configs interpreted_kernels plan_step startup_deadline track triton_kernels"),
}
_LONG_FILES = {f"tests/{tier}/test_{name}.py" for tier, names in _LONG.items() for name in names.split()}
"""Files that take long and guard one mechanism beside the ring, the exchange of weights, and recovery."""


def is_long(nodeid: str) -> bool:
    return nodeid.partition("::")[0] in _LONG_FILES


def is_over() -> bool:
    """Whether TASUKI_PROOF_MINUTES have passed since the start of the run: the remaining proofs are skipped."""
    return time.monotonic() > _ENDS_AT


only_whole = pytest.mark.skipif(not IS_WHOLE, reason="repeats what other tests show: in `make chaos`")


def crossed(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns all combinations in `make chaos`; in `make test` as many as the longest axis, so that every value occurs."""
    values = [list(axis) for axis in axes]
    if IS_WHOLE:
        return list(product(*values))
    longest = max(map(len, values))
    return list(zip(*(islice(cycle(axis), longest) for axis in values), strict=True))


def covering(cases: Sequence[dict[str, Any]], *, size: int) -> list[dict[str, Any]]:
    """Returns few of the cases, by greed, that have every combination of `size` values that occurs."""
    held = [{repr(some) for some in combinations(case.items(), size)} for case in cases]
    missing, chosen = set[str]().union(*held), list[dict[str, Any]]()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(held[index] & missing))
        missing -= held[best]
        chosen.append(cases[best])
    return chosen


def repeated(cases: Iterable[tuple[Any, ...]], *, is_repeat: Callable[..., bool]) -> list[Any]:
    """Marks as long the cases that repeat what the others show. is_repeat: takes the values of a case."""
    return [pytest.param(*case, marks=pytest.mark.long) if is_repeat(*case) else case for case in cases]


def examples(num_whole: int) -> int:
    """Returns Hypothesis's number of examples: `num_whole` in `make chaos`, an eighth of it in `make test`."""
    return num_whole if IS_WHOLE else max(5, num_whole // 8)
