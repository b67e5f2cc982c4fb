"""Tokens of the KV cache: how many a step needs, how many fit, and refusals of others."""

from dataclasses import replace

import pytest

from tasuki.planner.kv_tokens import CPU_TOKENS, running_requests, wanted_tokens
from tasuki.planner.node import GB
from tasuki.planner.plan import plan
from tasuki.planner.rollout_bytes import cuda_graphs, engine_step
from tasuki.wire.errors import InvalidArgument
from tests.unit.test_residency import MODEL, TRAIN, h200s, node


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
