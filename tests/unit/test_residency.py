"""Tags that stay on a GPU over a changeover: the planner's choice, and its form in a configuration."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.config.load import load_config
from tasuki.config.residency_schema import ResidencyConfig
from tasuki.config.save import save_config
from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import GB, RESIDENT, Layout, Part
from tasuki.planner.node_plan import node_layout
from tasuki.planner.plan import PLAN_STAGES, plan, plan_of, sizes_of
from tasuki.planner.presets import MODELS
from tasuki.planner.residency import as_config, decide, stay_and_leave
from tasuki.planner.seconds import expected_seconds, release_seconds
from tasuki.planner.step_bytes import step_moments
from tasuki.rpc.memory import staying_of_engine_rank, staying_tags
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import MemoryTag, Phase, Service, Stage

MODEL = MODELS["qwen2.5-7b"]
TRAIN = {
    "dataset": "d",
    "output_dir": "o",
    "reward": {"function": "a:b"},
    "prompts_per_step": 64,
    "group_size": 8,
    "max_new_tokens": 512,
    "max_prompt_tokens": 256,
}


def node(**tables: Any) -> NodeConfig:
    given = {"state_dir": "s", "device": "cuda", "model": {"path": "m"}}
    trainer = {"num_ranks": 2, "checkpointing": "full", "micro_batch_tokens": 8192, **tables.pop("trainer", {})}
    rollout = {"context_length": 4096, **tables.pop("rollout", {})}
    return NodeConfig.model_validate(given | {"trainer": trainer, "rollout": rollout} | tables)


def h200s(config: NodeConfig, *, gpu_bytes: int = 141 * GB) -> Layout:
    return node_layout(config, MODEL, gpu_bytes=gpu_bytes, host_bytes=2000 * GB)


def staying_on(layout: Layout, gpu: int = 0) -> frozenset[Part]:
    assert layout.staying is not None
    return layout.staying[gpu]


# --- tags that stay


def test_the_base_below_an_engines_adapters_never_moves() -> None:
    lora = {"trainer": {"lora": {"rank": 8}}}
    merged, adapter = (
        expected_seconds(plan(h200s(node(**lora, rollout={"lora": each}, residency={})))) for each in ("merged", "adapter")
    )
    assert merged[Stage.RESUME_WEIGHTS] > adapter[Stage.RESUME_WEIGHTS] == adapter[Stage.DRAIN]


def test_everything_stays_beside_the_kv_that_a_run_needs() -> None:
    layout = h200s(node(train=TRAIN))
    assert staying_on(layout) == set(RESIDENT)
    assert plan(layout).fits
    assert stay_and_leave(layout) == [("GPUs 0, 1", list(RESIDENT), [])]
    seconds = expected_seconds(plan(layout))
    assert max(seconds.values()) < 0.05


def test_room_goes_to_activations_before_it_goes_to_what_may_stay() -> None:
    rollout = {"tp_size": 1, "context_length": None}
    layouts = [
        h200s(
            node(train=TRAIN, trainer={"checkpointing": each, "micro_batch_tokens": None}, rollout=rollout), gpu_bytes=150 * GB
        )
        for each in ("full", "auto")
    ]
    assert [(layout.checkpointing, layout.kept_layers) for layout in layouts] == [("full", 1), ("attention", 18)]
    assert [leaves for layout in layouts for _, _, leaves in stay_and_leave(layout)] == [[], [Part.GRADIENTS, Part.KV_CACHE]]
    kept, left = (sum(expected_seconds(plan(layout)).values()) for layout in layouts)
    assert left - kept == pytest.approx(0.086, abs=0.005)


def test_with_most_kv_the_trainer_leaves_and_the_engines_weights_stay() -> None:
    layout = h200s(node())
    assert Part.ROLLOUT_WEIGHTS in staying_on(layout)
    assert not {Part.TRAINER_WEIGHTS, Part.OPTIMIZER, Part.KV_CACHE} & staying_on(layout)
    assert expected_seconds(plan(layout))[Stage.OFFLOAD] > 0.5
    trained, served = (plan(layout).stage(phase).gpus[0] for phase in (Phase.TRAIN, Phase.ROLLOUT))
    assert Part.ROLLOUT_WEIGHTS in trained and Part.KV_CACHE not in trained
    assert Part.TRAINER_WEIGHTS not in served


@pytest.mark.parametrize("tokens", [400_000, 1_200_000])
def test_no_choice_that_fits_costs_less(tokens: int) -> None:
    layout = h200s(node(rollout={"kv_tokens": tokens}))
    sizes = sizes_of(layout)
    known = {**sizes.trainer, **sizes.engine, Part.TORCH_CACHE: sum(sizes.work.values())}
    room = layout.gpu_bytes * 0.96 - layout.overheads.margin

    def cost(staying: frozenset[Part]) -> float:
        return sum(release_seconds(part, known[part], frozen=sizes.frozen) for part in RESIDENT if part not in staying)

    def fits(staying: frozenset[Part]) -> bool:
        planned = plan_of(replace(layout, staying=(staying,) * layout.num_gpus), sizes)
        return all(stage.gpu_bytes <= room for stage in planned.stages)

    chosen = staying_on(layout)
    assert fits(chosen)
    every = (frozenset(parts) for count in range(len(RESIDENT) + 1) for parts in combinations(RESIDENT, count))
    assert cost(chosen) == min(cost(staying) for staying in every if fits(staying))


@settings(max_examples=10, deadline=None)
@given(gb=some.integers(40, 200), tokens=some.integers(4096, 100_000), ranks=some.sampled_from([1, 2, 4]))
def test_what_stays_never_makes_a_plan_fail_that_fits_without(gb: int, tokens: int, ranks: int) -> None:
    try:
        layout = h200s(node(trainer={"num_ranks": ranks}, rollout={"kv_tokens": tokens}), gpu_bytes=gb * GB)
    except InvalidArgument:
        return
    released = replace(layout, staying=(frozenset[Part](),) * layout.num_gpus)
    if plan(released).fits:
        assert plan(layout).fits
    for stage in PLAN_STAGES:
        assert plan(layout).stage(stage).gpu_bytes >= plan(released).stage(stage).gpu_bytes


@pytest.mark.parametrize("gb", [44, 48, 60])
def test_what_stays_is_decided_with_the_cache_that_it_leaves_room_for(gb: int) -> None:
    """Parameters that leave although the engine reads them in place leave it room for a larger cache."""
    trainer = {"num_ranks": 8, "devices": list(range(8)), "param_dtype": "bfloat16"}
    trainer |= {"reference_on_host": False}
    layout = h200s(node(trainer=trainer, rollout={"devices": [0]}), gpu_bytes=gb * GB)
    assert layout.exports_parameters
    assert plan(replace(layout, staying=(frozenset(),) * 8)).fits
    assert plan(layout).fits


def test_apart_from_each_other_both_services_keep_everything() -> None:
    layout = h200s(node(trainer={"devices": ["0", "1"]}, rollout={"devices": ["2"], "kv_tokens": "most"}))
    assert [bool(stays) and not leaves for _, stays, leaves in stay_and_leave(layout)] == [True, True]
    residency = as_config(layout, node(trainer={"devices": ["0", "1"]}, rollout={"devices": ["2"]}), kv_tokens=None)
    assert [set(names) for names in residency.trainer] == [{"weights", "gradients", "optimizer", "export", "cache"}] * 2
    assert [set(names) for names in residency.rollout] == [{"weights", "kv_cache"}]


def test_the_base_below_adapters_stays_in_an_engine_that_serves_them() -> None:
    config = node(trainer={"lora": {"rank": 32}}, rollout={"lora": "adapter", "kv_ratio": 0.9})
    assert Part.ROLLOUT_WEIGHTS in staying_on(h200s(config))
    assert staying_of_engine_rank(config, 0) == {MemoryTag.WEIGHTS}
    given = node(trainer={"lora": {"rank": 32}}, rollout={"lora": "adapter"}, residency={})
    assert stay_and_leave(h200s(given))[0][1] == [Part.ROLLOUT_WEIGHTS], "an empty table cannot make it leave"


def test_a_base_that_never_changes_costs_no_copy_to_the_host() -> None:
    def offload_s(**trainer: Any) -> float:
        residency = {"trainer": [["export"], ["export"]]}
        config = node(trainer=trainer, rollout={"tp_size": 2, "kv_tokens": 8192}, residency=residency)
        planned = plan(node_layout(config, MODEL, gpu_bytes=141 * GB, host_bytes=2000 * GB))
        return expected_seconds(planned)[Stage.OFFLOAD]

    adapters = {"lora": {"rank": 32}}
    # Without the base, 0.16 GB of masters and 0.32 GB of moments; with it 7.8 GB, which would take 0.14 s.
    assert offload_s(**adapters) < 0.06
    assert offload_s() > 0.8, "7.6 billion masters and their moments are copied every time"
    critic = {"critic": {"lora_rank": 32}}
    assert offload_s(**adapters, **critic) < 0.08
    reference = node(train=TRAIN | {"loss": {"kl_coef": 0.01}}, rollout={"kv_tokens": 8192})
    frozen = sizes_of(h200s(reference)).frozen
    assert frozen == pytest.approx(2 * MODEL.num_parameters / 2, rel=0.01) and sizes_of(h200s(node())).frozen == 0
    shared = node(trainer={"lora": {"rank": 32, "share_base": True}}, rollout={"lora": "adapter", "tp_size": 2})
    assert sizes_of(h200s(shared)).frozen == 0, "the engine's base stays"


def test_a_base_that_is_copied_one_way_leaves_before_tensors_that_are_copied_both_ways() -> None:
    size = GB
    base, masters = (release_seconds(Part.TRAINER_WEIGHTS, size, frozen=frozen) for frozen in (size, 0))
    assert masters == release_seconds(Part.OPTIMIZER, size, frozen=0) == release_seconds(Part.OPTIMIZER, size, frozen=size)
    assert masters - base == pytest.approx(1 / 55)


@pytest.mark.parametrize(("name", "num_ranks"), [("qwen2.5-32b", 1), ("qwen2.5-72b", 2)])
def test_one_base_for_both_services_fits_where_two_do_not(name: str, num_ranks: int) -> None:
    model, trained = MODELS[name], {}
    for shares in (True, False):
        trainer = {"num_ranks": num_ranks, "micro_batch_tokens": 8192, "lora": {"rank": 32, "share_base": shares}}
        config = node(trainer=trainer, rollout={"lora": "adapter", "kv_tokens": 100_000, "tp_size": num_ranks})
        layout = node_layout(config, model, gpu_bytes=141 * GB, host_bytes=2000 * GB)
        assert plan(layout).fits is shares
        assert staying_on(layout) == (frozenset(RESIDENT) if shares else {Part.ROLLOUT_WEIGHTS})
        trained[shares] = [parts.get(Part.TRAINER_WEIGHTS, 0) for parts in plan(layout).stage(Phase.TRAIN).gpus]
    base = 2 * model.num_parameters / num_ranks
    assert [abs(twice - once - base) < 0.02 * base for once, twice in zip(*trained.values(), strict=True)] == [True] * num_ranks


def test_columns_that_ranks_join_are_planned_where_a_base_is_shared() -> None:
    def gathered(*, shares: bool) -> int:
        trainer = {"num_ranks": 2, "micro_batch_tokens": 4096, "lora": {"rank": 32, "share_base": shares}}
        config = node(trainer=trainer, rollout={"lora": "adapter", "tp_size": 2})
        layout = node_layout(config, MODEL, gpu_bytes=141 * GB, host_bytes=2000 * GB)
        return step_moments(layout)["layer"][Part.LAYERS]

    columns = MODEL.hidden_size * (MODEL.query_size + MODEL.intermediate_size)
    assert gathered(shares=True) - gathered(shares=False) == 2 * columns


@pytest.mark.parametrize(
    ("num_ranks", "changes", "problem"),
    [
        (1, {"num_experts": 8, "experts_per_token": 2, "expert_size": 64}, "has experts"),
        (2, {"has_fused_gate_up": True}, "has fused layers, of which each of 2 engine ranks holds several runs of rows"),
        (2, {"num_heads": 7}, "has 7 attention heads, which 2 ranks cannot share evenly"),
        (4, {"num_heads": 4, "num_kv_heads": 2}, "has 2 key-value heads, which 4 ranks"),
        (2, {"intermediate_size": 127}, "has 127 columns of the MLP"),
        (2, {"vocab_size": 131}, "has 131 rows of the vocabulary, which 2 ranks"),
        (2, {"vocab_size": 130}, "has 130 rows of the vocabulary: the engine pads them to a multiple of 64"),
        (1, {"vocab_size": 131, "has_fused_gate_up": True}, ""),
        (2, {"vocab_size": 130, "has_whole_embedding": True}, ""),
    ],
)
def test_a_base_that_ranks_hold_in_different_parts_is_not_shared(num_ranks: int, changes: dict[str, Any], problem: str) -> None:
    trainer = {"num_ranks": num_ranks, "lora": {"target_modules": ["q_proj"], "share_base": True}}
    config = node(trainer=trainer, rollout={"lora": "adapter", "tp_size": num_ranks})
    refused = pytest.raises(InvalidArgument, match=f"trainer.lora.share_base: Qwen2ForCausalLM {problem}.*; leave it out")
    with refused if problem else nullcontext():
        node_layout(config, replace(MODEL, **changes), gpu_bytes=141 * GB, host_bytes=2000 * GB)


@pytest.mark.parametrize("stays", [True, False])
def test_a_setting_for_the_export_is_kept(stays: bool) -> None:
    layout = h200s(node(train=TRAIN, trainer={"export_stays": stays}))
    assert (Part.EXPORT in staying_on(layout)) is stays
    in_place = h200s(node(train=TRAIN, trainer={"export_stays": stays, "param_dtype": "bfloat16"}))
    assert (Part.TRAINER_WEIGHTS in staying_on(in_place)) is stays


def test_a_budget_of_a_cpu_decides_as_a_gpus_memory_does() -> None:
    def staying(budget: int) -> frozenset[Part]:
        return staying_on(h200s(node(device="cpu", memory={"host_budget_bytes": budget}, rollout={"kv_tokens": 8192})))

    everything = set(RESIDENT) - {Part.TORCH_CACHE}
    layout = h200s(node(device="cpu", rollout={"kv_tokens": 8192}))
    assert staying_on(layout) == everything
    of_tags = max(
        sum(size for parts in stage.gpus for part, size in parts.items() if part in everything) for stage in plan(layout).stages
    )
    assert staying(of_tags) == everything
    assert staying(of_tags - 1) < everything


# --- form in a configuration


def test_a_decision_survives_the_file_and_is_not_made_again(tmp_path: Path) -> None:
    config = node(train=TRAIN)
    decided = as_config(h200s(config), config, kv_tokens=1000)
    written = config.model_copy(update={"residency": decided, "state_dir": tmp_path})
    save_config(written, tmp_path / "node.toml")
    read = load_config(tmp_path / "node.toml")
    assert read.residency == decided and decided.kv_tokens == 1000
    nothing = h200s(config.model_copy(update={"residency": ResidencyConfig()}))
    assert staying_on(nothing) == frozenset()
    assert staying_on(h200s(read)) == set(RESIDENT)


@pytest.mark.parametrize(
    ("residency", "message"),
    [
        ({"trainer": [["weights"]] * 3}, "residency.trainer names 3 ranks, and trainer has 2"),
        ({"trainer": [["export"]]}, "residency.trainer has export for some ranks only"),
        ({"rollout": [["kv_cache", "kv_cache"]]}, "names one of them twice"),
        ({"rollout": [["optimizer"]]}, "Input should be 'weights' or 'kv_cache'"),
    ],
)
def test_residency_that_makes_no_sense_is_refused(residency: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        node(residency=residency)


def test_what_only_some_ranks_keep_is_not_told_of_the_service() -> None:
    config = node(residency={"trainer": [["weights", "optimizer"], ["weights"]], "rollout": [["kv_cache"], ["kv_cache"]]})
    assert staying_tags(config, Service.TRAINER) == {MemoryTag.WEIGHTS}
    assert staying_tags(config, Service.ROLLOUT) == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
    assert staying_tags(node(), Service.TRAINER) == frozenset()


def test_a_choice_for_every_gpu_is_needed() -> None:
    with pytest.raises(InvalidArgument, match="staying"):
        replace(h200s(node()), staying=(frozenset(),))


def test_layouts_that_are_not_staged_keep_nothing_by_themselves() -> None:
    layout = h200s(node())
    assert decide(replace(layout, staying=None, strategy="v2"), export_stays=None) == (frozenset(),) * 2
