"""The plan of micro-batches: every sample once, within the cap, balanced over ranks in lock step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasuki.trainer.data.plan import plan_micro_batches


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(40, 200),
)
def test_a_plan_holds_every_sample_once_within_the_cap_and_alike_for_all_ranks(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert sorted(index for rank in plan for part in rank for index in part) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for part in rank:
            assert len(part) * max((lengths[index] for index in part), default=0) <= max_tokens
    num_samples = [sum(len(part) for part in rank) for rank in plan]
    assert max(num_samples) - min(num_samples) <= 1
    num_tokens = [sum(lengths[index] for part in rank for index in part) for rank in plan]
    assert max(num_tokens) - min(num_tokens) <= max(lengths)


def test_a_batch_that_fits_is_one_micro_batch_for_each_rank() -> None:
    assert [len(rank) for rank in plan_micro_batches([5] * 64, num_ranks=2, max_tokens=160)] == [1, 1]
