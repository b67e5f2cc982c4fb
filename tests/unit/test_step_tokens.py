"""Tokens of a micro-batch if the configuration leaves them open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasuki.cli.plan import Wishes, layout_of
from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import GB, Checkpointing, Layout
from tasuki.planner.node_plan import node_layout
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.planner.step_tokens import fastest_checkpointing, most_tokens, with_fastest_checkpointing, with_last_layer_kept
from tasuki.wire.stages import Stage

SHAPE = MODELS["qwen2.5-7b"]
LAYOUT = Layout(
    model=SHAPE, num_gpus=4, num_ranks=4, gpu_bytes=141 * GB, host_bytes=2000 * GB, num_engines=4, kv_ratio=0.3,
    checkpointing=Checkpointing.FULL,
)  # fmt: skip


def enough_for(tokens: int) -> Layout:
    """Layout whose GPUs are just large enough for `tokens`: at the peak, in SYNC, the memory cached by a step is still there."""
    peak = plan(replace(LAYOUT, micro_batch_tokens=tokens)).gpu_peak
    assert peak.stage in (Stage.RESUME_WEIGHTS, Stage.SYNC)
    return replace(LAYOUT, gpu_bytes=peak.gpu_bytes + LAYOUT.overheads.margin)


@pytest.mark.parametrize("tokens", [16_384, 8192, 4096, 2048, 1024])
def test_the_planner_takes_the_most_tokens_with_which_everything_fits(tokens: int) -> None:
    full = enough_for(tokens)
    assert plan(replace(full, micro_batch_tokens=tokens)).fits
    assert most_tokens(full) == tokens
    short = replace(full, gpu_bytes=full.gpu_bytes - 1)
    assert most_tokens(short) == max(1024, tokens // 2)


def test_a_sequence_that_rollout_serves_fits_into_a_micro_batch() -> None:
    small = replace(enough_for(1024), context_length=3000)
    assert most_tokens(small) == 4096
    assert most_tokens(replace(small, context_length=30_000)) == 16_384


def test_the_planner_keeps_as_much_for_backward_as_there_is_room_for() -> None:
    layout, rungs = LAYOUT, list(Checkpointing)
    peaks = [plan(replace(layout, checkpointing=rung)).gpu_peak for rung in rungs]
    for rung, slower, peak in zip(rungs, [*rungs[1:], rungs[-1]], peaks, strict=True):
        just = replace(layout, gpu_bytes=peak.gpu_bytes + layout.overheads.margin)
        assert fastest_checkpointing(just) is rung
        assert fastest_checkpointing(replace(just, gpu_bytes=just.gpu_bytes - 1)) is slower
    assert fastest_checkpointing(replace(just, host_bytes=plan(layout).host_peak.host_bytes + layout.overheads.margin)) is (
        Checkpointing.FULL
    ), "nothing is held on a host without room for it"


def test_layers_that_there_is_room_for_keep_everything() -> None:
    for gpu_gb in (80, 90, 100, 115):
        layout = with_fastest_checkpointing(replace(LAYOUT, gpu_bytes=gpu_gb * GB))
        assert layout.checkpointing is Checkpointing.ATTENTION
        wary = replace(layout, gpu_bytes=int(0.95 * layout.gpu_bytes))
        assert plan(wary).fits and not plan(replace(wary, kept_layers=layout.kept_layers + 1)).fits
    assert with_fastest_checkpointing(LAYOUT) == replace(LAYOUT, checkpointing=Checkpointing.NONE)
    tight = replace(LAYOUT, gpu_bytes=60 * GB)
    assert with_fastest_checkpointing(tight).kept_layers == 0


@pytest.mark.parametrize("rung", [Checkpointing.ATTENTION, Checkpointing.FULL])
def test_the_last_layer_is_kept_where_no_stage_is_larger_for_it(rung: Checkpointing) -> None:
    layout = replace(LAYOUT, checkpointing=rung)
    kept = with_last_layer_kept(layout)
    assert kept == replace(layout, kept_layers=1)
    stages = zip(plan(kept).stages, plan(layout).stages, strict=True)
    assert all(one.gpu_bytes <= other.gpu_bytes for one, other in stages)
    two = replace(layout, kept_layers=2)
    assert plan(two).gpu_peak.gpu_bytes > plan(layout).gpu_peak.gpu_bytes, "a second one is not free"
    assert with_last_layer_kept(two) == two, "more than the last one is a choice already made"


@pytest.mark.parametrize("settings", [{"checkpointing": Checkpointing.NONE}, {"device": "cpu"}])
def test_a_last_layer_that_is_kept_already_or_never_stays_so(settings: dict[str, Any]) -> None:
    layout = replace(LAYOUT, **settings)
    assert with_last_layer_kept(layout) == layout


def test_what_tokens_cannot_mend_does_not_lower_them() -> None:
    for changed in (replace(LAYOUT, kv_ratio=0.98), replace(LAYOUT, host_bytes=GB)):
        assert not plan(changed).fits
        assert most_tokens(changed) == 16_384


def node(device: str, **trainer: Any) -> Layout:
    tables = {"model": {"path": "m"}, "trainer": {"checkpointing": "full", "num_ranks": 4, **trainer}}
    config = NodeConfig.model_validate({"state_dir": "node", "device": device, "rollout": {"kv_ratio": 0.3}, **tables})
    return node_layout(config, SHAPE, gpu_bytes=70 * GB, host_bytes=2000 * GB)


def test_a_node_on_a_gpu_has_what_the_planner_takes_unless_it_is_told() -> None:
    assert node("cuda").micro_batch_tokens == 8192
    assert plan(node("cuda")).fits
    assert not plan(node("cuda", micro_batch_tokens=16_384)).fits
    assert node("cuda", micro_batch_tokens=5000).micro_batch_tokens == 5000


def test_a_node_on_a_cpu_has_as_many_as_always() -> None:
    assert node("cpu").micro_batch_tokens == 8192


def test_the_command_line_plans_a_model_with_the_tokens_that_a_node_would_have() -> None:
    full = {"checkpointing": Checkpointing.FULL}
    wishes = (Wishes(preset="balanced", gpu_gb=size, settings=full) for size in (36, 141))
    small, large = (layout_of(None, each).micro_batch_tokens for each in wishes)
    assert small < large == 16_384
    given = Wishes(preset="balanced", gpu_gb=36, settings={"micro_batch_tokens": 16_384})
    assert layout_of(None, given).micro_batch_tokens == 16_384


def test_it_keeps_as_much_for_backward_as_a_node_would() -> None:
    for size in (36, 60, 141):
        layout = layout_of(None, Wishes(preset="balanced", gpu_gb=size))
        assert layout.checkpointing is fastest_checkpointing(layout)
    assert layout.checkpointing is Checkpointing.NONE
