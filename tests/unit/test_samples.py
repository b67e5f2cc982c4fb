"""Samples as columns: the caller's samples, selections of them, and the ranks' shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.trainer.data.samples import COLUMNS, Samples
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import decode_parts, decode_scores, encode_parts
from tasuki.v1.types_pb2 import TrainingSample
from tests.unit.training_samples import make_sample


def made(lengths: list[tuple[int, int]], columns: set[str], seed: int) -> list[TrainingSample]:
    """Makes samples of these prompt and completion lengths, each with the same columns."""
    generator = np.random.default_rng(seed)
    return [
        TrainingSample(
            prompt_token_ids=generator.integers(0, 99, num_prompt).tolist(),
            completion_token_ids=generator.integers(0, 99, num_completion).tolist(),
            policy_version=int(generator.integers(0, 2**40)),
            temperature=float(generator.random() + 0.5),
            **{name: generator.normal(size=num_completion).tolist() for name in sorted(columns)},
        )
        for num_prompt, num_completion in lengths
    ]


many_messages = st.builds(
    made,
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8),
    columns=st.sets(st.sampled_from(COLUMNS)),
    seed=st.integers(0, 2**32),
)


def assert_equal(one: Samples, other: Samples) -> None:
    for name in ("num_prompt_S", "num_completion_S", "policy_version_S", "token_ids_T"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.columns.keys() == other.columns.keys()
    for name, column_N in one.columns.items():
        np.testing.assert_array_equal(column_N, other.columns[name], err_msg=name)


@given(many_messages)
def test_ranks_get_what_the_front_has(messages: list[TrainingSample]) -> None:
    samples = decode_samples(messages)
    (received,) = decode_parts(encode_parts(samples, [range(len(samples))]))
    assert_equal(received, samples)


@given(many_messages, st.data())
def test_chosen_samples_are_those_of_a_call_with_them_alone(messages: list[TrainingSample], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(messages))))
    indices = order[: data.draw(st.integers(1, len(messages)))]
    assert_equal(decode_samples(messages).select(indices), decode_samples([messages[index] for index in indices]))


def test_per_token_fields_are_spread_and_defaults_filled_in() -> None:
    samples = decode_samples(
        [
            make_sample(loss_mask=[1, 0, 1], temperature=0.5),
            make_sample(completion_token_ids=[8, 9], rollout_log_probs=[-1, -2], advantages=[0.5, -0.5]),
        ]
    )
    assert samples.columns["advantages"].tolist() == [1.0, 1.0, 1.0, 0.5, -0.5]
    assert samples.columns["loss_mask"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert samples.columns["temperature"].tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert samples.columns.keys() == {"loss_mask", "temperature", "rollout_log_probs", "advantages"}


def test_one_advantage_for_one_token_is_not_spread_over_others() -> None:
    one = make_sample(completion_token_ids=[8], rollout_log_probs=[-1], advantages=[7.0])
    assert decode_samples([one, make_sample(), one]).columns["advantages"].tolist() == [7.0, 1.0, 1.0, 1.0, 7.0]


@pytest.mark.parametrize(("wanted", "rows"), [([0, 1], [[0, 1, 2], [3, 4]]), ([1], [[3, 4]]), ([], [])])
def test_scores_are_cut_by_sample(wanted: list[int], rows: list[list[float]]) -> None:
    content = np.arange(5, dtype=np.float32).tobytes()
    assert [row.tolist() for row in decode_scores(content, num_tokens_S=np.array([3, 2]), wanted=wanted)] == rows
    assert decode_scores(b"", num_tokens_S=np.array([], dtype=np.int64), wanted=[]) == []
