"""Predictions of the planner: measured facts that it must reproduce, and invariants of every plan."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.config.schema import NodeConfig
from tasuki.models import folder_files
from tasuki.models.shape import ModelShape
from tasuki.planner.advice import advise, largest_kv_ratio
from tasuki.planner.choose import choose, plan_node
from tasuki.planner.node import GB, MIB, TAGS, Checkpointing, Node, Part, Strategy
from tasuki.planner.plan import Plan, PlanStage, needed_bytes, plan
from tasuki.planner.presets import MODELS
from tasuki.planner.step_bytes import step_moments
from tasuki.wire.stages import Phase, Stage
from tests.extent import examples
from tests.planned import node_with
from tests.unit.test_config_json import write_model
from tools.bench import plan_gpu


def h200s(model: ModelShape | str, **given: Any) -> Node:
    """8 GPUs of 141 GB, full shard, full checkpointing."""
    return node_with(model, num_ranks=8, **({"checkpointing": Checkpointing.FULL} | given))


def tag_bytes(planned: Plan, stage: PlanStage, *parts: Part) -> float:
    """GB of these parts on the first GPU."""
    return sum(planned.stage(stage).gpus[0].get(part, 0) for part in parts) / GB


# GB on rank 0's GPU, as an H200's driver reported (tools/bench/plan_gpu.py), by size, ranks and micro-batches of a step: end of a step,
# with the export arena, asleep, awake again.
MEASURED = {("qwen2.5-0.5b", 2, 1): (9.977, 10.472, 2.289, 7.054), ("qwen2.5-1.5b", 2, 2): (21.654, 23.200, 3.421, 17.850)}


@pytest.mark.parametrize(("size", "num_ranks", "num_micro_batches"), MEASURED)
def test_a_trainers_stages_are_predicted_within_5_percent_of_what_an_h200_showed(
    size: str, num_ranks: int, num_micro_batches: int
):
    predicted = plan_gpu.predict(plan_gpu.node_for(size, gpu_bytes=150 * GB, device="cuda", num_ranks=num_ranks))
    measured = MEASURED[size, num_ranks, num_micro_batches]
    assert [predicted[stage, "driver"] / GB for stage in plan_gpu.STAGES] == pytest.approx(measured, rel=0.05)


# GB of rank 0's GPU after steps of 7B on two H200s, as the driver reported (tools/bench/trainer_step_gpu.py), by what is kept for backward,
# last layers that keep everything, tokens of a micro-batch, completion tokens of one, and ranks that share it.
STEPS = {(Checkpointing.OFFLOADED, 5, 16_384, 8077, 1): 84.21, (Checkpointing.ATTENTION, 19, 16_384, 8077, 1): 113.65}
# The same when MLPs kept their product, as compiled ones do.
WITH_PRODUCTS = {
    (Checkpointing.NONE, 0, 12_288, 6057, 1): 129.72,
    (Checkpointing.ATTENTION, 0, 16_384, 8077, 1): 84.01,
    (Checkpointing.FULL, 0, 16_384, 8077, 1): 81.06,
    (Checkpointing.FULL, 0, 32_768, 16_154, 2): 81.51,
    (Checkpointing.FULL, 0, 65_537, 32_768, 2): 87.74,
}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_is_predicted_within_1_percent_of_what_two_h200s_showed(is_compiled: bool):
    for case, measured in (WITH_PRODUCTS if is_compiled else STEPS).items():
        checkpointing, kept_layers, num_tokens, num_logits, sequence_parallel = case
        node = node_with(
            num_ranks=2, gpu_bytes=150 * GB, checkpointing=checkpointing, kept_layers=kept_layers, micro_batch_tokens=num_tokens,
            logit_tokens=num_logits,
            trainer={"sequence_parallel": sequence_parallel, "compile": "blocks" if is_compiled else "none", "prefix_sharing": False},
        )  # fmt: skip
        assert plan_gpu.predict(node)[Phase.TRAIN, "driver"] / GB == pytest.approx(measured, rel=0.01), case


KL = {"dataset": "d.jsonl", "output_dir": "o", "reward": {"function": "r.py:r"}, "loss": {"kl_coef": 0.1}}
BIG = {"rollout": {"tp_size": 8, "kv_ratio": 0.9}, "micro_batch_tokens": 16_384}


def test_32b_at_kv_ratio_0_9_runs_out_of_memory_when_everything_wakes_at_once():
    planned = plan(h200s("qwen2.5-32b", strategy=Strategy.ONE_STAGE, **BIG))
    assert not planned.fits
    assert planned.gpu_peak.stage in (Stage.RESUME_WEIGHTS, Stage.SYNC)
    assert tag_bytes(planned, Stage.RESUME_WEIGHTS, Part.TRAINER_WEIGHTS) == pytest.approx(16.4, rel=0.05)


def test_32b_at_kv_ratio_0_9_fits_in_stages():
    planned = plan(choose(h200s("qwen2.5-32b", **BIG)))
    assert planned.fits
    served = tag_bytes(planned, Stage.RESUME_KV, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.CUDA_GRAPH, Part.CONTEXTS)
    assert served == pytest.approx(127, rel=0.03)


def test_the_ladder_out_of_one_stage_is_the_staged_strategy():
    advice = advise(plan(h200s("qwen2.5-32b", strategy=Strategy.ONE_STAGE, **BIG)))
    assert [(rung.setting, rung.new) for rung in advice.ladder] == [("strategy", "v3")]
    assert advice.solves


def test_relaunching_has_no_engine_while_it_trains():
    planned = plan(h200s("qwen2.5-7b", strategy=Strategy.RELAUNCH))
    assert tag_bytes(planned, Phase.TRAIN, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.EXPORT) == 0
    assert tag_bytes(planned, Stage.RESUME_WEIGHTS, *TAGS[:3]) == 0
    written = planned.stage(Stage.LOAD_WEIGHTS).host_bytes - planned.stage(Stage.OFFLOAD).host_bytes
    assert written == 2 * MODELS["qwen2.5-7b"].num_parameters


def test_resident_services_keep_everything_in_every_stage():
    planned = plan(h200s("qwen2.5-7b", strategy=Strategy.RESIDENT, rollout={"kv_ratio": 0.5}))
    for stage in planned.stages:
        assert set(TAGS) <= set(stage.gpus[0])


def test_what_a_stage_needs_is_what_it_adds():
    planned = plan(h200s("qwen2.5-7b", rollout={"tp_size": 4, "dp_size": 1}))
    weights = needed_bytes(planned, Stage.RESUME_WEIGHTS)
    assert set(weights.gpus[0]) == {Part.ROLLOUT_WEIGHTS}
    assert weights.gpus[4] == {}  # no engine there
    cache = needed_bytes(planned, Stage.RESUME_KV)
    assert set(cache.gpus[0]) == {Part.KV_CACHE, Part.CUDA_GRAPH}
    first = needed_bytes(planned, Stage.RESUME_KV, has_published=False)
    assert set(first.gpus[0]) == {Part.KV_CACHE, Part.CUDA_GRAPH, Part.ENGINE_STEP}
    assert cache.gpus[0][Part.KV_CACHE] == planned.kv_pool.num_bytes
    training = needed_bytes(planned, Stage.LOAD_TRAINER)
    assert training.gpu_bytes == sum(planned.stage(Phase.TRAIN).gpus[0].values()) - sum(
        planned.stage(Stage.PAUSE_WEIGHTS).gpus[0].values()
    )
    assert needed_bytes(planned, Stage.DRAIN).gpu_bytes == 0


def test_only_the_first_publish_needs_room_for_the_export_arena():
    planned = plan(h200s("qwen2.5-7b"))
    assert needed_bytes(planned, Stage.LOAD_WEIGHTS).gpu_bytes == 0
    first = needed_bytes(planned, Stage.LOAD_WEIGHTS, has_published=False)
    assert [set(parts) for parts in first.gpus] == [{Part.EXPORT}] * 8
    assert first.gpu_bytes == pytest.approx(2 * MODELS["qwen2.5-7b"].num_parameters / 8, rel=0.01)


def test_the_largest_kv_ratio_fits_and_the_next_does_not():
    ratio = largest_kv_ratio(h200s("qwen2.5-7b")) or 0.0
    fits = [plan(choose(h200s("qwen2.5-7b", rollout={"kv_ratio": one}))).fits for one in (ratio, round(ratio + 0.01, 2))]
    assert fits == [True, False]


def test_no_more_than_two_groups_have_whole_gradients():
    layout = h200s("qwen2.5-7b")
    table, layer = 152_064 * 3584, sum(math.prod(shape) for shape in layout.model.layer(0).values())
    moments = step_moments(layout)
    # A group's gradients as computed and as sent; the projection's as sent, while the last layer's are computed.
    assert moments["layer"][Part.WHOLE_GRADIENTS] == (2 + 4) * layer + 4 * table
    assert moments["table"][Part.WHOLE_GRADIENTS] == (2 + 4) * table
    adapters = step_moments(h200s("qwen2.5-7b", trainer={"lora": {"rank": 32}}))
    assert adapters["layer"][Part.WHOLE_GRADIENTS] == adapters["table"][Part.WHOLE_GRADIENTS] == 0


@settings(max_examples=examples(40), deadline=None)
@given(tokens=some.integers(1, 60_000), more=some.integers(0, 60_000), mode=some.sampled_from(list(Checkpointing)))
def test_more_tokens_never_take_less(tokens: int, more: int, mode: Checkpointing):
    few, many = (
        plan(h200s("qwen2.5-0.5b", micro_batch_tokens=count, checkpointing=mode)).stage(Phase.TRAIN).gpu_bytes
        for count in (tokens, tokens + more)
    )
    assert few <= many


@settings(max_examples=examples(40), deadline=None)
@given(low=some.floats(0.01, 0.99), high=some.floats(0.01, 0.99), strategy=some.sampled_from(list(Strategy)))
def test_a_larger_kv_ratio_never_takes_less(low: float, high: float, strategy: Strategy):
    low, high = sorted((low, high))
    small, large = (plan(h200s("qwen2.5-0.5b", rollout={"kv_ratio": ratio}, strategy=strategy)) for ratio in (low, high))
    assert small.gpu_peak.gpu_bytes <= large.gpu_peak.gpu_bytes
    assert small.kv_pool.num_tokens <= large.kv_pool.num_tokens


def test_a_node_on_a_cpu_takes_its_memory_from_the_host(tmp_path: Path):
    tables = {
        "trainer": {"num_ranks": 2},
        "rollout": {"engine": {"max_total_tokens": 1000}},
        "model": {"path": write_model(tmp_path)},
    }
    node = NodeConfig.model_validate({"state_dir": tmp_path, **tables})
    planned = plan_node(node, gpu_bytes=1, host_bytes=24 * GB)
    assert planned.fits
    one_rank = planned.stage(Stage.LOAD_TRAINER).gpus[1]
    assert one_rank[Part.GRADIENTS] == 2 * MIB  # one chunk
    host = planned.stage(Stage.LOAD_TRAINER).host
    assert host[Part.GRADIENTS] == 2 * one_rank[Part.GRADIENTS]
    assert planned.kv_pool.num_bytes == 2 * MIB, "one chunk"


def test_ranks_that_share_hold_a_part_of_the_tokens_each():
    alone = h200s("qwen2.5-7b", micro_batch_tokens=16_384)
    shared = h200s("qwen2.5-7b", micro_batch_tokens=4 * 16_384, trainer={"sequence_parallel": 4})
    one, other = (step_moments(layout)["layer"][Part.ACTIVATIONS] for layout in (alone, shared))
    # The attention output of the recomputed layer, on its way back to the tokens' ranks.
    assert other - one == 16_384 * 3584 * 2
    assert step_moments(alone)["loss"] == step_moments(shared)["loss"]
    too_long = plan(replace(alone, micro_batch_tokens=4 * 16_384)).stage(Phase.TRAIN)
    assert too_long.gpu_bytes > plan(shared).stage(Phase.TRAIN).gpu_bytes


def test_a_sample_that_is_too_long_for_one_gpu_is_told_to_share_it():
    rollout = {"context_length": 660_000, "engine": {"max_total_tokens": 660_000}, "kv_ratio": 0.5}
    model = replace(MODELS["qwen2.5-7b"], context_length=660_000)
    node = h200s(model, checkpointing=Checkpointing.OFFLOADED, trainer={"micro_batch_tokens": 660_000}, rollout=rollout)
    advice = advise(plan(choose(node)))
    assert "trainer.sequence_parallel" in {rung.setting for rung in advice.ladder}


def test_moments_on_the_host_take_nothing_of_a_gpu_in_any_stage():
    resident, streamed = (plan(h200s("qwen2.5-7b", trainer={"moments": moments})) for moments in ("gpu", "host"))
    for before, after in zip(resident.stages, streamed.stages, strict=True):
        assert Part.OPTIMIZER not in after.gpus[0]
        assert before.gpu_bytes - after.gpu_bytes == before.gpus[0].get(Part.OPTIMIZER, 0)
        assert after.host[Part.OPTIMIZER] == pytest.approx(8 * MODELS["qwen2.5-7b"].num_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "has_reference", "on_host"),
    [
        ({}, False, False),
        ({"train": KL}, True, False),
        ({"train": KL, "trainer": {"reference_on_host": True}}, True, True),
        ({"trainer": {"reference_on_host": False}}, True, False),
        ({"trainer": {"reference_on_host": True}}, True, True),
        ({"train": KL, "trainer": {"lora": {"rank": 8}}}, False, False),
    ],
    ids=str,
)
def test_a_reference_is_planned_where_a_key_says_that_it_is_used(settings: dict[str, Any], has_reference: bool, on_host: bool):
    found = node_with(num_ranks=2, **settings)
    assert (found.has_reference, found.has_reference and found.config.reference_is_on_host) == (has_reference, on_host)


def test_the_bytes_of_a_reference_are_on_the_gpu_or_on_the_host() -> None:
    def weights(**trainer: bool) -> tuple[int, int]:
        training = plan(node_with(num_ranks=2, trainer=trainer)).stage(Phase.TRAIN)
        return training.gpus[0][Part.TRAINER_WEIGHTS], training.host[Part.TRAINER_WEIGHTS]

    none, on_gpu, on_host = weights(), weights(reference_on_host=False), weights(reference_on_host=True)
    shard = MODELS["qwen2.5-7b"].num_parameters  # two bytes each, over two ranks
    assert on_gpu[0] - none[0] == pytest.approx(shard, abs=2**30), "in chunks of up to 1 GiB"
    assert on_host[0] == none[0]
    assert on_host[1] - none[1] == pytest.approx(2 * shard, rel=0.02)


def test_the_models_copy_takes_the_bytes_of_its_files_on_the_host_in_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 15 * GB)  # sparse
    (tmp_path / "model.bin").write_bytes(b"not read")
    plain = plan(node_with(host_bytes=500 * GB, model_folder=tmp_path))
    monkeypatch.setattr(folder_files, "is_on_network", lambda folder: True)
    copied = plan(node_with(host_bytes=500 * GB, model_folder=tmp_path))
    for now, then in zip(copied.stages, plain.stages, strict=True):
        assert now.host_bytes - then.host_bytes == now.host[Part.MODEL_COPY] == 15 * GB + 2
        assert now.gpu_bytes == then.gpu_bytes
