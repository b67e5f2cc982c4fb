"""Checks of samples, the plan of micro-batches, and the packing into tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasuki.trainer.data.checks import (
    BatchLimits,
    check_loss_fields,
    check_sequences,
    check_versions,
    count_gap_tokens,
    count_loss_tokens,
    plan_micro_batches,
)
from tasuki.trainer.data.micro_batch import loss_batch, token_batch
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument, VersionOrder

LIMITS = BatchLimits(vocab_size=10, context_length=8, micro_batch_tokens=7)
CPU = torch.device("cpu")


def make_sample(**fields: Any) -> TrainingSample:
    good: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "advantages": [1.0],
    }
    return TrainingSample(**{**good, **fields})


def check_all(samples: list[TrainingSample]) -> None:
    check_sequences(samples, limits=LIMITS)
    check_loss_fields(samples, kl_coef=0.0)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"prompt_token_ids": []}, "samples[1].prompt_token_ids", "empty"),
        ({"completion_token_ids": []}, "samples[1].completion_token_ids", "empty"),
        ({"prompt_token_ids": [1, 10]}, "samples[1].prompt_token_ids[1]", "no token id"),
        ({"completion_token_ids": [3, -1, 5]}, "samples[1].completion_token_ids[1]", "no token id"),
        ({"prompt_token_ids": [1] * 6}, "samples[1]", "9 tokens, above the model's context length of 8"),
        ({"prompt_token_ids": [1] * 5}, "samples[1]", "8 tokens, above trainer.micro_batch_tokens of 7"),
        ({"rollout_log_probs": [-0.1]}, "samples[1].rollout_log_probs", "has 1 entries; give 3"),
        ({"rollout_log_probs": [-0.1, float("nan"), 0]}, "samples[1].rollout_log_probs[1]", "nan is not finite"),
        ({"advantages": []}, "samples[1].advantages", "has 0 entries; give 3 or 1"),
        ({"advantages": [1.0, 2.0]}, "samples[1].advantages", "has 2 entries"),
        ({"advantages": [1.0, 2.0, float("nan")]}, "samples[1].advantages[2]", "nan is not finite"),
        ({"advantages": [float("inf")]}, "samples[1].advantages[0]", "inf is not finite"),
        ({"loss_mask": [1.0]}, "samples[1].loss_mask", "has 1 entries; give 3 or 0"),
        ({"loss_mask": [1.0, 0.5, 0.0]}, "samples[1].loss_mask[1]", "neither 0 nor 1"),
        ({"ref_log_probs": [-0.1] * 2}, "samples[1].ref_log_probs", "has 2 entries"),
        ({"ref_log_probs": [-0.1] * 3}, "samples[1].ref_log_probs", "for every sample or for none"),
    ],
)
def test_a_wrong_field_is_named_with_its_sample(fields: dict[str, Any], field: str, words: str) -> None:
    samples = [make_sample(), make_sample(**fields), make_sample()]
    with pytest.raises(InvalidArgument) as raised:
        check_all(samples)
    assert raised.value.metadata["field"] == field
    assert words in raised.value.message


def test_good_samples_pass() -> None:
    samples = [make_sample(), make_sample(advantages=[1.0, 2.0, 3.0], loss_mask=[1, 0, 1])]
    check_all(samples)
    assert count_loss_tokens(samples) == 5


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no samples"):
        check_sequences([], limits=LIMITS)


def test_a_batch_without_a_counted_token_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="masks every token"):
        count_loss_tokens([make_sample(loss_mask=[0, 0, 0])])


def test_kl_needs_reference_log_probs() -> None:
    with pytest.raises(InvalidArgument, match=r"samples\[0\].ref_log_probs: empty, but kl_coef is 0.1"):
        check_loss_fields([make_sample()], kl_coef=0.1)


def test_gap_tokens_are_those_of_the_present_version_that_count() -> None:
    samples = [make_sample(policy_version=3), make_sample(policy_version=2), make_sample(policy_version=3, loss_mask=[1, 0, 0])]
    assert count_gap_tokens(samples, policy_version=3) == 4


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


def test_tokens_are_packed_with_the_places_that_predict_them() -> None:
    batch = token_batch([make_sample(), make_sample(prompt_token_ids=[7], completion_token_ids=[8, 9])], device=CPU)
    assert batch.input_ids_BL.tolist() == [[1, 2, 3, 4], [7, 8, 0, 0]]
    assert batch.positions_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.token_ids_T.tolist() == [3, 4, 5, 8, 9]
    assert batch.num_completion_tokens == (3, 2)


def test_per_token_fields_are_spread_and_defaults_filled_in() -> None:
    samples = [
        make_sample(policy_version=1, loss_mask=[1, 0, 1]),
        make_sample(completion_token_ids=[8, 9], rollout_log_probs=[-1, -2], advantages=[0.5, -0.5]),
    ]
    batch = loss_batch(samples, policy_version=1, device=CPU)
    assert batch.advantages_T.tolist() == [1.0, 1.0, 1.0, 0.5, -0.5]
    assert batch.loss_mask_T.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert batch.is_current_T.tolist() == [True, True, True, False, False]
    assert batch.ref_log_probs_T is None


def test_a_rank_without_samples_gets_one_token_that_counts_nothing() -> None:
    batch = loss_batch([], policy_version=0, device=CPU)
    assert batch.tokens.input_ids_BL.shape == (1, 1)
    assert batch.tokens.positions_T.shape == batch.loss_mask_T.shape == (0,)
    assert batch.tokens.num_completion_tokens == ()


def test_sample_of_a_version_that_the_trainer_never_had_is_refused_by_its_place() -> None:
    samples = [make_sample(policy_version=2), make_sample(policy_version=3), make_sample(policy_version=4)]
    check_versions(samples[:2], policy_version=3)
    with pytest.raises(VersionOrder, match=r"samples\[2\].policy_version: 4 is above the trainer's 3") as refused:
        check_versions(samples, policy_version=3)
    assert refused.value.metadata == {"have": "3", "want": "4"}
