"""Plan of samples that share prompts: every sample once, prompts counted once, and never more expensive than without sharing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.models.family import Model, full_attention
from tasuki.planner.presets import MODELS
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.data.micro_batch import pack
from tasuki.trainer.data.plan import MicroBatchPlan, Sharing, plan_shared
from tasuki.trainer.data.samples import NO_PREFIX, Samples
from tests.unit.test_prefix_sharing import make_samples

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
