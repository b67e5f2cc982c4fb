"""Tags that stay on a GPU over a changeover, tokens of the KV cache, a shared base, parallel starts, and the file of a node's choices."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.cli.plan import headline
from tasuki.config.choices import Choices, plan_path, read_choices, write_choices
from tasuki.config.schema import NodeConfig
from tasuki.models.shape import unshared_base
from tasuki.planner.choose import choices_of, chosen, may_fit, may_share_base, parts_at_start, starts_together
from tasuki.planner.kv_tokens import CPU_TOKENS, running_requests, wanted_tokens
from tasuki.planner.node import GB, MARGIN, RESIDENT, Node, Part, Strategy, node_of
from tasuki.planner.plan import PLAN_STAGES, plan, plan_of, sizes_of
from tasuki.planner.presets import MODELS
from tasuki.planner.residency import chosen_staying, decide, expected_seconds, release_seconds, stay_and_leave
from tasuki.planner.rollout_bytes import cuda_graphs, engine_step
from tasuki.planner.step_bytes import step_moments
from tasuki.rollout.arguments import _PLANNED_FRACTION
from tasuki.rpc.memory import staying_of_engine_rank, staying_tags
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.stages import MemoryTag, Phase, Service, Stage
from tests.planned import chosen_node, config_of

MODEL = MODELS["qwen2.5-7b"]
NOTHING = Choices(micro_batch_tokens=1, checkpointing="none")
SMALL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
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


def h200s(config: NodeConfig, *, gpu_bytes: int = 141 * GB) -> Node:
    return chosen_node(config, MODEL, gpu_bytes=gpu_bytes)


def leaving(layout: Node) -> Node:
    """The node, of which nothing stays."""
    return layout.keeping(frozenset())


def staying_on(layout: Node, gpu: int = 0) -> frozenset[Part]:
    return layout.staying[gpu]


# --- tags that stay


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


@pytest.mark.parametrize("tokens", [400_000, 1_200_000])
def test_no_choice_that_fits_costs_less(tokens: int) -> None:
    layout = h200s(node(rollout={"engine": {"max_total_tokens": tokens}}))
    sizes = sizes_of(layout)
    known = {**sizes.trainer, **sizes.engine, Part.TORCH_CACHE: sum(sizes.work.values())}
    room = layout.gpu_bytes * 0.96 - MARGIN

    def cost(staying: frozenset[Part]) -> float:
        return sum(release_seconds(part, known[part], frozen=sizes.frozen) for part in RESIDENT if part not in staying)

    def fits(staying: frozenset[Part]) -> bool:
        planned = plan_of(layout.keeping(staying), sizes)
        return all(stage.gpu_bytes <= room for stage in planned.stages)

    chosen = staying_on(layout)
    assert fits(chosen)
    every = (frozenset(parts) for count in range(len(RESIDENT) + 1) for parts in combinations(RESIDENT, count))
    assert cost(chosen) == min(cost(staying) for staying in every if fits(staying))


@settings(max_examples=10, deadline=None)
@given(gb=some.integers(40, 200), tokens=some.integers(4096, 100_000), ranks=some.sampled_from([1, 2, 4]))
def test_what_stays_never_makes_a_plan_fail_that_fits_without(gb: int, tokens: int, ranks: int) -> None:
    try:
        layout = h200s(node(trainer={"num_ranks": ranks}, rollout={"engine": {"max_total_tokens": tokens}}), gpu_bytes=gb * GB)
    except InvalidArgument:
        return
    released = leaving(layout)
    if plan(released).fits:
        assert plan(layout).fits
    for stage in PLAN_STAGES:
        assert plan(layout).stage(stage).gpu_bytes >= plan(released).stage(stage).gpu_bytes


def test_apart_from_each_other_both_services_keep_everything() -> None:
    config = node(trainer={"devices": ["0", "1"]}, rollout={"devices": ["2"]})
    layout = h200s(config)
    assert [bool(stays) and not leaves for _, stays, leaves in stay_and_leave(layout)] == [True, True]
    choices = choices_of(layout)
    assert [set(names) for names in choices.trainer] == [{"weights", "gradients", "optimizer", "export", "cache"}] * 2
    assert [set(names) for names in choices.rollout] == [{"weights", "kv_cache"}]


def test_the_base_below_adapters_stays_in_an_engine_that_serves_them() -> None:
    config = node(trainer={"lora": {"rank": 32}}, rollout={"lora": "adapter", "kv_ratio": 0.9})
    assert Part.ROLLOUT_WEIGHTS in staying_on(h200s(config))
    assert staying_of_engine_rank(config, NOTHING, 0) == {MemoryTag.WEIGHTS}
    nothing = replace(h200s(config), staying=chosen_staying(h200s(config), NOTHING))
    assert stay_and_leave(nothing)[0][1] == [Part.ROLLOUT_WEIGHTS], "no choice can make it leave"


def test_a_base_that_never_changes_costs_no_copy_to_the_host() -> None:
    def offload_s(**trainer: Any) -> float:
        layout = h200s(node(trainer=trainer, rollout={"tp_size": 2, "engine": {"max_total_tokens": 8192}}))
        return expected_seconds(plan(layout.keeping(frozenset({Part.EXPORT}))))[Stage.OFFLOAD]

    adapters = {"lora": {"rank": 32}}
    # Without the base, 0.16 GB of masters and 0.32 GB of moments; with it 7.8 GB, which would take 0.14 s.
    assert offload_s(**adapters) < 0.06
    assert offload_s() > 0.8, "7.6 billion masters and their moments are copied every time"
    critic = {"critic": {"lora_rank": 32}}
    assert offload_s(**adapters, **critic) < 0.08
    reference = node(train=TRAIN | {"loss": {"kl_coef": 0.01}}, rollout={"engine": {"max_total_tokens": 8192}})
    frozen = sizes_of(h200s(reference)).frozen
    assert frozen == pytest.approx(2 * MODEL.num_parameters / 2, rel=0.01) and sizes_of(h200s(node())).frozen == 0
    beside = h200s(node(trainer={"lora": {"rank": 32}}, rollout={"lora": "adapter", "tp_size": 2}))
    assert sizes_of(replace(beside, shares_base=True)).frozen == 0, "the engine's base stays"


@pytest.mark.parametrize(("name", "num_ranks"), [("qwen2.5-32b", 1), ("qwen2.5-72b", 2)])
def test_a_base_is_shared_where_two_do_not_fit(name: str, num_ranks: int) -> None:
    model = MODELS[name]
    trainer = {"num_ranks": num_ranks, "micro_batch_tokens": 8192, "lora": {"rank": 32}}
    config = node(trainer=trainer, rollout={"lora": "adapter", "engine": {"max_total_tokens": 100_000}, "tp_size": num_ranks})
    shared = chosen_node(config, model)
    twice = replace(shared, shares_base=False)
    assert shared.shares_base and choices_of(shared).shares_base
    assert plan(shared).fits and not plan(twice).fits
    assert staying_on(shared) == frozenset(RESIDENT)
    trained = [[parts.get(Part.TRAINER_WEIGHTS, 0) for parts in plan(one).stage(Phase.TRAIN).gpus] for one in (shared, twice)]
    base = 2 * model.num_parameters / num_ranks
    assert [abs(more - less - base) < 0.02 * base for less, more in zip(*trained, strict=True)] == [True] * num_ranks


def test_a_base_is_not_shared_where_a_second_copy_costs_nothing() -> None:
    trainer, rollout = {"lora": {"rank": 32}}, {"lora": "adapter", "tp_size": 2, "engine": {"max_total_tokens": 100_000}}
    assert not h200s(node(trainer=trainer, rollout=rollout)).shares_base


@pytest.mark.parametrize(
    ("trainer", "rollout", "tables"),
    [
        ({}, {"lora": "merged"}, {}),
        ({}, {"tp_size": 1}, {}),
        ({"compute_dtype": "float32"}, {}, {}),
        ({"devices": ["0", "1"]}, {"devices": ["1", "0"]}, {}),
        ({}, {}, {"device": "cpu"}),
    ],
)
def test_a_trainer_rank_can_read_only_an_engine_rank_of_its_own(
    trainer: dict[str, Any], rollout: dict[str, Any], tables: dict[str, Any]
) -> None:
    lora, adapter = {"lora": {"rank": 32}}, {"lora": "adapter", "tp_size": 2}
    assert may_share_base(node(trainer=lora, rollout=adapter), MODEL)
    assert not may_share_base(node(trainer=lora | trainer, rollout=adapter | rollout, **tables), MODEL)


def test_columns_that_ranks_join_are_planned_where_a_base_is_shared() -> None:
    config = node(trainer={"micro_batch_tokens": 4096, "lora": {"rank": 32}}, rollout={"lora": "adapter", "tp_size": 2})
    shared, alone = (step_moments(replace(h200s(config), shares_base=shares))["layer"][Part.LAYERS] for shares in (True, False))
    assert shared - alone == 2 * MODEL.hidden_size * (MODEL.query_size + MODEL.intermediate_size)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "problem"),
    [
        (1, {"num_experts": 8, "experts_per_token": 2, "expert_size": 64}, "has experts"),
        (1, {"architecture": "Gemma2ForCausalLM"}, "has weights that the engine changes"),
        (1, {"has_fused_qkv": True}, "has weights that the engine changes"),
        (2, {"has_fused_gate_up": True}, "has fused layers, of which each of 2 engine ranks holds several runs of rows"),
        (2, {"num_heads": 7}, "has 7 attention heads, which 2 ranks cannot share evenly"),
        (4, {"num_heads": 4, "num_kv_heads": 2}, "has 2 key-value heads, which 4 ranks"),
        (2, {"intermediate_size": 127}, "has 127 columns of the MLP"),
        (2, {"vocab_size": 131}, "has 131 rows of the vocabulary, which 2 ranks"),
        (2, {"vocab_size": 130}, "has 130 rows of the vocabulary: the engine pads them to a multiple of 64"),
        (1, {"vocab_size": 131, "has_fused_gate_up": True}, None),
        (2, {"vocab_size": 130, "has_whole_embedding": True}, None),
    ],
)
def test_a_base_that_ranks_hold_in_different_parts_is_not_shared(num_ranks: int, changes: dict[str, Any], problem: str | None):
    found = unshared_base(replace(MODEL, **changes), num_ranks=num_ranks)
    assert found is None if problem is None else found is not None and found.startswith(problem)


def merged(name: str, **trainer: Any) -> Node:
    """On one H200, with 256 GiB of host memory."""
    config = config_of(trainer=trainer, rollout={"engine": {"max_total_tokens": 100_000}})
    return chosen_node(config, MODELS[name], gpu_bytes=150_700_000_000, host_bytes=256 << 30)


EXPERTS = {"rank": 16, "experts": True, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_adapters_are_merged_in_place_where_no_copy_fits(backend: str) -> None:
    in_place = merged("qwen3-30b-a3b", lora=EXPERTS, backend=backend)
    assert in_place.merges_in_place and choices_of(in_place).merges_in_place and plan(in_place).fits
    copied = replace(in_place, merges_in_place=False)
    assert not plan(copied).fits
    assert may_fit(in_place, at_any_ratio=True)
    for stage in plan(in_place).stages:
        assert Part.EXPORT not in stage.gpus[0]
    more = plan(copied).stage(Stage.SYNC).gpu_bytes - plan(in_place).stage(Stage.SYNC).gpu_bytes
    assert more == pytest.approx(2 * MODELS["qwen3-30b-a3b"].num_parameters, rel=0.01)
    assert Part.TRAINER_WEIGHTS not in staying_on(in_place), "it holds merged weights"
    assert Part.EXPORT not in staying_on(in_place) and "merged in place" in headline(in_place)
    assert Part.TRAINER_WEIGHTS in plan(in_place).stage(Phase.ROLLOUT).host
    again = chosen(replace(in_place, merges_in_place=False), choices_of(in_place))
    assert plan(again).stages == plan(in_place).stages


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("qwen2.5-7b", {"lora": {"rank": 32}}),  # a copy that stays
        ("qwen3-30b-a3b", {"lora": EXPERTS, "compute_dtype": "float32"}),
        ("qwen3-30b-a3b", {}),
    ],
)
def test_adapters_are_not_merged_in_place_where_a_copy_fits_or_the_base_is_not_what_is_read(name: str, trainer: dict[str, Any]):
    assert not merged(name, **trainer).merges_in_place


def test_a_base_that_is_merged_in_place_leaves_although_there_is_room() -> None:
    roomy = replace(merged("qwen2.5-7b", lora={"rank": 32}), merges_in_place=True)
    assert Part.TRAINER_WEIGHTS not in decide(roomy)[0] and Part.OPTIMIZER in decide(roomy)[0]


# --- services that start at once


def counted(**tables: Any) -> NodeConfig:
    rollout = {"engine": {"max_total_tokens": 400_000}} | tables.pop("rollout", {})
    return node(
        trainer={"checkpointing": "auto", "micro_batch_tokens": None} | tables.pop("trainer", {}), rollout=rollout, **tables
    )


def test_both_start_at_once_where_the_planned_cache_and_the_trainers_state_fit() -> None:
    assert starts_together(h200s(counted()))
    assert not starts_together(h200s(counted(rollout={"engine": {"max_total_tokens": 1_000_000}})))
    assert not starts_together(h200s(counted(), gpu_bytes=80 * GB))


def test_the_trainer_waits_where_the_engine_sizes_its_cache_or_loads_for_both() -> None:
    most = node()
    assert not starts_together(h200s(most))
    assert not starts_together(replace(h200s(counted()), shares_base=True))
    on_cpu = h200s(counted(device="cpu"))
    assert starts_together(on_cpu) and not starts_together(replace(on_cpu, shares_base=True))


@pytest.mark.parametrize("gpu_bytes", [80 * GB, 141 * GB])
def test_torchs_cache_is_returned_where_the_fullest_later_stage_would_lack_memory(gpu_bytes: int) -> None:
    planned = plan(h200s(counted(), gpu_bytes=gpu_bytes))
    later = planned.stages[planned.stages.index(planned.stage(Stage.LOAD_WEIGHTS)) :]
    fullest = max(stage.gpu_bytes for stage in later)
    assert planned.stage(Stage.LOAD_WEIGHTS).gpu_bytes + choices_of(planned.node).later_bytes == fullest
    assert choices_of(h200s(counted(device="cpu"))).later_bytes == 0


def test_services_on_gpus_of_their_own_start_at_once_however_full_these_are() -> None:
    apart = {"trainer": {"devices": ["0", "1"]}, "rollout": {"devices": ["2", "3"], "engine": {}}}
    assert starts_together(h200s(counted(**apart), gpu_bytes=90 * GB))


@pytest.mark.parametrize("gpu_bytes", range(60 * GB, 200 * GB, 10 * GB))
def test_sglang_finds_room_for_the_planned_cache_whenever_it_looks(gpu_bytes: int) -> None:
    """SGLang takes the memory free after its weights, minus a share of that before, and silently serves fewer tokens than asked."""
    layout = h200s(counted(), gpu_bytes=gpu_bytes)
    if not starts_together(layout):
        return
    parts = parts_at_start(layout, 0)
    after_weights = gpu_bytes - sum(size for part, size in parts.items() if part not in (Part.KV_CACHE, Part.CUDA_GRAPH))
    before_weights = gpu_bytes  # before the trainer begins, SGLang's share is largest
    assert after_weights - (1 - _PLANNED_FRACTION) * before_weights >= parts[Part.KV_CACHE]


def test_a_start_counts_all_of_both_but_the_memory_of_a_step() -> None:
    layout = h200s(counted())
    at_start, step = parts_at_start(layout, 0), plan(layout).stage(Phase.TRAIN).gpus[0]
    both = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.EXPORT)
    assert {*both, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.CUDA_GRAPH, Part.CONTEXTS, Part.WHOLE_GRADIENTS} <= at_start.keys()
    assert all(at_start[part] == step[part] for part in both if part in step)
    assert at_start[Part.ACTIVATIONS] < step[Part.ACTIVATIONS] / 10


def test_a_trainer_that_replays_steps_waits_for_the_engine() -> None:
    config = counted()
    together = [choices_of(h200s(config), resumes=resumes).starts_together for resumes in (False, True)]
    assert together == [True, False]


# --- the file


def test_choices_survive_the_file_and_lay_out_the_same_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    config = node(train=TRAIN, model={"path": tmp_path})
    layout = chosen_node(config)
    choices = choices_of(layout)
    write_choices(choices, tmp_path)
    assert read_choices(tmp_path) == choices
    again = chosen(node_of(config, gpu_bytes=141 * GB, host_bytes=2000 * GB), choices)
    assert plan(again).stages == plan(layout).stages


def test_a_folder_without_a_node_has_no_choices(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="start the node with `tasuki up`"):
        read_choices(tmp_path)
    plan_path(tmp_path).write_text("{}")
    with pytest.raises(InvalidArgument, match="no plan of this version"):
        read_choices(tmp_path)


def test_what_only_some_ranks_keep_is_not_told_of_the_service() -> None:
    some = NOTHING.model_copy(
        update={"trainer": (("weights", "optimizer"), ("weights",)), "rollout": (("kv_cache",), ("kv_cache",))}
    )
    assert staying_tags(node(), some, Service.TRAINER) == {MemoryTag.WEIGHTS}
    assert staying_tags(node(), some, Service.ROLLOUT) == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
    assert staying_tags(node(), NOTHING, Service.TRAINER) == frozenset()


def test_nodes_that_are_not_staged_keep_nothing_by_themselves() -> None:
    assert decide(replace(h200s(node()), strategy=Strategy.ONE_STAGE)) == (frozenset(),) * 2


def test_a_step_needs_its_samples_at_their_longest_shared_by_the_replicas() -> None:
    assert wanted_tokens(node(train=TRAIN), context_length=4096) == 64 * 8 // 2 * (256 + 512 + 8)
    one = node(train=TRAIN, rollout={"dp_size": 1, "max_running_requests": 100})
    assert wanted_tokens(one, context_length=4096) == 100 * (256 + 512 + 8)


def test_drafts_take_room_for_two_steps_of_every_sample() -> None:
    for engine, drafts in (({}, 12), ({"speculative_num_draft_tokens": 5}, 5)):
        config = node(train=TRAIN, rollout={"engine": {"speculative_algorithm": "NGRAM", **engine}})
        assert wanted_tokens(config, context_length=4096) == 64 * 8 // 2 * (256 + 512 + 8 + 2 * drafts)


def test_drafts_take_logits_in_the_step_and_in_graphs() -> None:
    plain, drafting = (
        h200s(node(train=TRAIN, rollout={"engine": {"max_total_tokens": 50_000, **engine}}))
        for engine in ({}, {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5})
    )
    assert engine_step(drafting) - engine_step(plain) == 256 * MODEL.vocab_size * 4 * (4 * 5 - 2)
    assert cuda_graphs(drafting) > 10**9 > cuda_graphs(plain)


def test_without_a_run_fewer_requests_draft_at_once() -> None:
    engine = {"speculative_algorithm": "NGRAM"}
    assert running_requests(node(rollout={"engine": engine})) == 48
    assert running_requests(node(rollout={"engine": engine, "max_running_requests": 64})) == 64
    assert running_requests(node(train=TRAIN, rollout={"engine": engine})) == 256


def test_a_cache_holds_at_least_one_sequence_of_full_length() -> None:
    few = node(train=TRAIN | {"prompts_per_step": 1, "group_size": 2})
    assert wanted_tokens(few, context_length=4096) == 4096


def test_without_a_bound_for_prompts_the_context_decides_or_nothing_does() -> None:
    unbounded = {key: value for key, value in TRAIN.items() if key != "max_prompt_tokens"}
    assert wanted_tokens(node(train=unbounded), context_length=4096) == 256 * (4096 + 8)
    assert wanted_tokens(node(train=unbounded, rollout={"context_length": None}), context_length=32_768) is None
    assert wanted_tokens(node(), context_length=4096) is None
    assert wanted_tokens(node(train=TRAIN, rollout={"engine": {"max_total_tokens": 5000}}), context_length=4096) == 5000


def test_on_a_cpu_a_step_takes_no_more_than_the_cache_that_is_made_without_it() -> None:
    assert wanted_tokens(node(device="cpu", train=TRAIN), context_length=4096) == CPU_TOKENS
    few = node(device="cpu", train=TRAIN | {"prompts_per_step": 2})
    assert wanted_tokens(few, context_length=4096) == 16 * (256 + 512 + 8)


def test_what_is_needed_is_bounded_by_the_ratio() -> None:
    assert plan(h200s(node(train=TRAIN | {"prompts_per_step": 4096}))).kv_pool == plan(h200s(node())).kv_pool


@pytest.mark.parametrize(("device", "where"), [("cuda", "kv_ratio = 0.85 leaves of a GPU"), ("cpu", "of this machine")])
def test_tokens_beyond_what_fits_are_refused_with_the_bytes_and_what_fits(device: str, where: str) -> None:
    config = node(device=device, rollout={"engine": {"max_total_tokens": 50_000_000}})
    with pytest.raises(InvalidArgument, match=where) as refused:
        h200s(config)
    told = refused.value.metadata
    assert told["field"] == "rollout.engine.max_total_tokens" and int(told["needed_bytes"]) > int(told["free_bytes"])
    most = int(refused.value.message.split("give at most ")[1].split(",")[0])
    layout = h200s(node(device=device, rollout={"engine": {"max_total_tokens": most}}))
    assert layout.kv_tokens == most
    assert device == "cuda" or plan(layout).fits, "on a CPU beside everything else"


def test_tokens_beyond_a_budget_are_refused_with_a_number_that_fits() -> None:
    memory = {"host_budget_bytes": 200 * GB}
    with pytest.raises(InvalidArgument, match=f"that memory.host_budget_bytes = {200 * GB} leaves") as refused:
        h200s(node(device="cpu", memory=memory, rollout={"engine": {"max_total_tokens": 50_000_000}}))
    most = int(refused.value.message.split("give at most ")[1].split(",")[0])
    layout = h200s(node(device="cpu", memory=memory, rollout={"engine": {"max_total_tokens": most}}))
    bare = replace(layout.keeping(frozenset()), kv_tokens=most + 1)
    assert plan(layout).fits and not plan(bare).fits


def test_tokens_for_less_than_a_sequence_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_total_tokens: = 100 cannot hold one sequence of 4096"):
        h200s(node(rollout={"engine": {"max_total_tokens": 100}}))
