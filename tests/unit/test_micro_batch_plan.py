"""Micro-batches: costs of samples, plans that make ranks wait least, shares of nodes, and samples that share prompts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.models.family import Attention, Model, full_attention
from tasuki.models.shape import ModelShape
from tasuki.planner.presets import MODELS
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.data.micro_batch import pack
from tasuki.trainer.data.plan import MicroBatchPlan, Sharing, plan_micro_batches, plan_shared, split_samples
from tasuki.trainer.data.samples import NO_PREFIX, Samples
from tests.limits import limit_s
from tests.unit.test_prefix_sharing import make_samples
from tools.bench.micro_batches import LENGTHS, RANKS, ideal_cost, packed_cost, padded_cost, padded_snake_plan

DENSE = ModelShape(
    architecture="Qwen2ForCausalLM", hidden_size=8, intermediate_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2,
    vocab_size=32, context_length=64, has_qkv_bias=True,
)  # fmt: skip
ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8
"""Counts the weights of queries, keys, values and output."""
MLP = 3 * 8 * 16


def model(shape: ModelShape, *windows: int | None) -> Model:
    attention = full_attention(shape)
    return Model(shape=shape, attention=Attention(query_scale=1.0, windows=windows) if windows else attention)


def test_a_token_costs_six_flops_for_each_weight_that_it_is_multiplied_with() -> None:
    cost = sample_cost(model(DENSE))
    assert cost.linear == 6 * 3 * (ATTENTION + MLP)
    assert cost.quadratic == 7 * 3 * 8
    assert cost.flops(np.array([0, 5])).tolist() == [0, 5 * (cost.linear + cost.head) + 25 * cost.quadratic]
    tied = sample_cost(model(replace(DENSE, is_tied=True)))
    assert tied == cost


def test_under_adapters_weights_have_no_gradient() -> None:
    cost, frozen = sample_cost(model(DENSE)), sample_cost(model(DENSE), is_frozen=True)
    assert (frozen.linear, frozen.head, frozen.quadratic) == (cost.linear * 4 / 6, cost.head * 4 / 6, cost.quadratic)


def test_only_tokens_of_a_completion_reach_the_head() -> None:
    cost = sample_cost(model(DENSE))
    assert cost.head == 6 * 32 * 8
    all_of_it, few, none = cost.flops(np.array([9, 9, 9]), completions_S=np.array([9, 2, 0]))
    assert (all_of_it - few, few - none) == (7 * cost.head, 2 * cost.head)
    assert all_of_it == cost.flops(np.array([9]))[0]


def test_a_critic_has_one_output() -> None:
    cost = sample_cost(model(replace(DENSE, is_critic=True)))
    assert (cost.linear, cost.head) == (6 * 3 * (ATTENTION + MLP), 6 * 8)


def test_a_token_costs_as_many_experts_as_are_chosen_for_it() -> None:
    sparse = replace(DENSE, num_experts=10, experts_per_token=2, expert_size=4, dense_layers=frozenset({1}))
    experts, router = 2 * 3 * 8 * 4, 10 * 8
    assert sample_cost(model(sparse)).linear == 6 * (3 * ATTENTION + MLP + 2 * (experts + router))


@pytest.mark.parametrize("length", [1, 99, 100, 101, 5000])
def test_a_layer_with_a_window_costs_the_pairs_within_it(length: int) -> None:
    cost = sample_cost(model(DENSE, 100, None, 100))
    pairs = sum(min(place, 100) for place in range(1, length + 1)) * 2 + length * (length + 1) // 2
    # Twice the pairs, minus one per token and layer, is the square of a length.
    flops = cost.flops(np.array([length]), completions_S=np.array([0]))[0]
    assert flops == pytest.approx(length * cost.linear + 7 * 8 * (2 * pairs - 3 * length), rel=0.02)


QWEN = sample_cost(Model(shape=MODELS["qwen2.5-7b"], attention=full_attention(MODELS["qwen2.5-7b"])))
CAP = 40
# The longest and shortest often: they fill micro-batches by tokens long before these are even in cost.
LENGTHS_OF_CALLS = st.integers(1, CAP) | st.sampled_from([1, 2, CAP // 2, CAP])
SAMPLES = LENGTHS_OF_CALLS.flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))
CALLS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 5),
        "max_tokens": st.integers(CAP, 3 * CAP),
        "cost": st.builds(SampleCost, linear=st.floats(0.01, 100), quadratic=st.floats(0, 10), head=st.floats(0, 100)),
        "samples": st.lists(SAMPLES, min_size=1, max_size=80),
    }
).map(lambda call: arguments_of(**call))


def arguments_of(*, samples: Sequence[tuple[int, int]], **others: Any) -> dict[str, Any]:
    return {"lengths": [length for length, _ in samples], "completions": [completion for _, completion in samples], **others}


def flops_of(call: dict) -> list[float]:
    return call["cost"].flops(np.array(call["lengths"]), completions_S=np.array(call["completions"])).tolist()


def costs_of(plan: MicroBatchPlan, flops: Sequence[float]) -> list[list[float]]:
    """[micro-batch][rank]."""
    return [[sum(flops[index] for index in part) for part in step] for step in zip(*plan, strict=True)]


@given(call=CALLS)
def test_a_plan_holds_every_sample_once_within_the_cap_and_as_many_micro_batches_for_all_ranks(call: dict) -> None:
    lengths, cap = call["lengths"], call["max_tokens"]
    plan = plan_micro_batches(**call)
    assert sorted(index for rank in plan for part in rank for index in part) == list(range(len(lengths)))
    assert len(plan) == call["num_ranks"]
    assert len({len(rank) for rank in plan}) == 1
    assert max(sum(lengths[index] for index in part) for rank in plan for part in rank) <= cap
    # No two of the emptiest would fit into one, so they are more than half full on average.
    assert len(plan[0]) <= -(-(2 * sum(lengths) // cap + 1) // call["num_ranks"])


@given(call=CALLS)
def test_a_micro_batch_is_empty_only_where_no_other_has_two_samples(call: dict) -> None:
    sizes = {len(part) for rank in plan_micro_batches(**call) for part in rank}
    assert 0 not in sizes or sizes == {0, 1}


@given(call=CALLS)
def test_the_kth_micro_batches_are_even_or_no_exchange_of_two_samples_lowers_the_dearest(call: dict) -> None:
    lengths, cap = call["lengths"], call["max_tokens"]
    plan = plan_micro_batches(**call)
    flops = [*flops_of(call), 0.0]
    tokens = [*lengths, 0]
    for step, costs in zip(zip(*plan, strict=True), costs_of(plan, flops), strict=True):
        dear = int(np.argmax(costs))
        if costs[dear] <= 1.001 * sum(costs) / len(costs):
            continue
        for other in set(range(len(step))) - {dear}:
            for given_index in step[dear]:
                for taken_index in (*step[other], -1):  # the last entry is not a sample
                    shift, moved = flops[given_index] - flops[taken_index], tokens[given_index] - tokens[taken_index]
                    fits = sum(tokens[index] for index in step[other]) + moved <= cap
                    fits &= sum(tokens[index] for index in step[dear]) - moved <= cap
                    assert not (fits and shift > 0 and max(costs[dear] - shift, costs[other] + shift) < 0.999999 * costs[dear])


@given(call=CALLS)
def test_the_dearest_micro_batches_come_first(call: dict) -> None:
    costs = [max(step) for step in costs_of(plan_micro_batches(**call), flops_of(call))]
    assert all(one >= 0.999999 * other for one, other in pairwise(costs))


@given(call=CALLS, data=st.data())
def test_the_order_of_samples_decides_only_among_those_of_one_length_and_cost(call: dict, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(call["lengths"]))))
    shuffled = {**call, **{name: [call[name][index] for index in order] for name in ("lengths", "completions")}}

    def shapes(call: dict) -> list[list[list[tuple[int, float]]]]:
        flops = flops_of(call)
        return [
            [sorted((call["lengths"][index], flops[index]) for index in part) for part in rank]
            for rank in plan_micro_batches(**call)
        ]

    assert plan_micro_batches(**call) == plan_micro_batches(**call)
    assert shapes(call) == shapes(shuffled)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_step_costs_little_more_than_the_ideal(name: str, num_ranks: int) -> None:
    each = LENGTHS[name]
    bound = {"long, few": 1.15, "long-tailed": 1.05, "wide": 1.04}.get(name, 1.03)
    for seed in range(5):
        drawn = each.draw(seed)
        lengths, flops = drawn.lengths.tolist(), drawn.flops(QWEN)
        completions = drawn.completions.tolist()
        plan = plan_micro_batches(lengths, completions=completions, num_ranks=num_ranks, max_tokens=each.max_tokens, cost=QWEN)
        # Lower bound of every plan.
        least = max(ideal_cost(flops, num_ranks=num_ranks), max(flops))
        assert packed_cost(plan, flops) <= bound * least
        padded = padded_snake_plan(lengths, num_ranks=num_ranks, max_tokens=each.max_tokens)
        assert len(plan[0]) <= len(padded[0])
        if num_ranks == 8:
            assert padded_cost(padded, flops) > 1.1 * packed_cost(plan, flops)


def test_a_long_sample_s_round_leaves_samples_for_every_other_micro_batch() -> None:
    """21 and 10 tokens fit beside the 40, which would leave one of the other two micro-batches empty."""
    cost = SampleCost(linear=0.01, quadratic=1.0)
    plan = plan_micro_batches([40, 21, 21, 10], num_ranks=2, max_tokens=40, cost=cost)
    assert [[len(part) for part in rank] for rank in plan] == [[1, 1], [1, 1]]


def test_short_samples_are_beside_each_other_while_a_long_one_runs() -> None:
    """A sample that fills its micro-batch runs beside the fullest of the others, not their average."""
    cost = SampleCost(linear=1.0, quadratic=0.0)
    plan = plan_micro_batches([16, *[1] * 24], num_ranks=2, max_tokens=16, cost=cost)
    assert costs_of(plan, [16.0, *[1.0] * 24]) == [[16, 16], [4, 4]]


@pytest.mark.parametrize("shortest", [1, 500, 9000])
def test_ten_thousand_samples_are_planned_in_half_a_second(shortest: int) -> None:
    lengths = np.random.default_rng(0).integers(shortest, 16_384, 10_000, endpoint=True).tolist()
    started = time.process_time()
    plan_micro_batches(lengths, num_ranks=8, max_tokens=16_384, cost=QWEN)
    assert time.process_time() - started < limit_s(0.5)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 16])
@pytest.mark.parametrize("num_samples", [1, 5, 64])
def test_every_sample_goes_to_one_node(num_nodes: int, num_samples: int) -> None:
    lengths = np.random.default_rng(num_samples).integers(2, 200, size=num_samples).tolist()
    shares = split_samples(
        lengths, num_nodes=num_nodes, num_ranks=2, max_tokens=256, cost=SampleCost(linear=1.0, quadratic=0.01)
    )
    assert sorted(position for share in shares for position in share) == list(range(num_samples))
    assert len(shares) == num_nodes and all(share == sorted(share) for share in shares)
    assert sum(map(bool, shares)) == min(num_nodes, num_samples)


QWEN = sample_cost(Model(shape=MODELS["qwen2.5-7b"], attention=full_attention(MODELS["qwen2.5-7b"])))
GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)), min_size=1, max_size=6
).map(tuple)


def num_tokens(samples: Samples, plan: MicroBatchPlan) -> list[list[int]]:
    """[round][rank] tokens that the model computes."""
    return [[len(pack(samples.select(part)).rows_T) for part in parts] for parts in zip(*plan, strict=True)]


@given(
    groups=GROUPS,
    num_ranks=st.integers(1, 4),
    room=st.integers(0, 60),
    cost=st.builds(
        SampleCost, linear=st.floats(0.01, 100), quadratic=st.floats(0, 10), head=st.floats(0, 50), merge=st.floats(0, 1)
    ),
    sharing=st.sampled_from(Sharing),
)
def test_a_plan_holds_every_sample_once_within_the_cap(
    groups: tuple, num_ranks: int, room: int, cost: SampleCost, sharing: Sharing
) -> None:
    samples = replace(make_samples(groups), prefix_S=None)
    cap = int(samples.num_tokens_S.max()) + room
    shared, plan = plan_shared(samples, num_ranks=num_ranks, max_tokens=cap, cost=cost, sharing=sharing)
    assert sorted(index for rank in plan for part in rank for index in part) == list(range(len(samples)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert max(map(max, num_tokens(shared, plan))) <= cap
    if sharing is Sharing.ALWAYS and any(len(lengths) > 1 for _, lengths in groups):
        assert shared.prefix_S is not None
        for row in range(len(samples)):
            mine = np.flatnonzero(shared.prefix_S == shared.prefix_S[row]) if shared.prefix_S[row] != NO_PREFIX else [row]
            prompts = {tuple(samples.select([index]).token_ids_T[: samples.num_prompt_S[index]]) for index in mine}
            assert len(prompts) == 1


def test_groups_stay_whole_where_that_is_even() -> None:
    samples = replace(make_samples(((1000, (50,) * 8), (1000, (50,) * 8))), prefix_S=None)
    shared, plan = plan_shared(samples, num_ranks=2, max_tokens=2000, cost=QWEN, sharing=Sharing.WHERE_CHEAPER)
    assert num_tokens(shared, plan) == [[1392, 1392]]


def test_a_group_is_divided_where_ranks_would_wait() -> None:
    samples = replace(make_samples(((100, (1000,) * 8),)), prefix_S=None)
    shared, plan = plan_shared(samples, num_ranks=4, max_tokens=9000, cost=QWEN, sharing=Sharing.WHERE_CHEAPER)
    assert num_tokens(shared, plan) == [[2098] * 4]


def test_a_group_above_the_cap_is_divided_and_repeats_its_prompt() -> None:
    samples = replace(make_samples(((60, (20,) * 8),)), prefix_S=None)
    shared, plan = plan_shared(samples, num_ranks=1, max_tokens=140, cost=QWEN, sharing=Sharing.ALWAYS)
    assert num_tokens(shared, plan) == [[60 + 4 * 19], [60 + 4 * 19]]


@pytest.mark.parametrize(("num_prompt", "is_shared"), [(1, False), (100, True)])
def test_a_prompt_is_shared_where_that_is_cheaper(num_prompt: int, is_shared: bool) -> None:
    samples = replace(make_samples(((num_prompt, (2000,) * 4),)), prefix_S=None)
    shared, _ = plan_shared(samples, num_ranks=1, max_tokens=16_384, cost=QWEN, sharing=Sharing.WHERE_CHEAPER)
    assert (shared.prefix_S is not None) is is_shared


def test_a_call_without_shared_prompts_is_planned_as_ever() -> None:
    samples = replace(make_samples(((5, (2,)), (5, (3,)))), prefix_S=None)
    shared, _ = plan_shared(samples, num_ranks=1, max_tokens=64, cost=QWEN, sharing=Sharing.ALWAYS)
    assert shared is samples
