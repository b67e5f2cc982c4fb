"""Tensors of a micro-batch: sequences without padding, and the loss's inputs for each completion token."""

import pytest
import torch

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.trainer.data.micro_batch import SequencePart, micro_batch, token_batch
from tasuki.trainer.service.requests import decode_samples
from tasuki.v1.types_pb2 import VersionSpan
from tests.refusal import refusing
from tests.unit.training_samples import make_sample

CPU = torch.device("cpu")
SAMPLES = decode_samples(
    [
        make_sample(policy_version=1, loss_mask=[1, 0, 1], temperature=0.5),
        make_sample(prompt_token_ids=[7], completion_token_ids=[8, 9], rollout_log_probs=[-1, -2], advantages=[0.5, -0.5]),
    ]
)


def test_tokens_are_packed_with_the_places_that_predict_them() -> None:
    batch = token_batch(SAMPLES, device=CPU)
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 7, 8]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens_S.tolist() == [0, 4, 6]
    assert batch.max_seqlen == 4
    assert batch.places_N.tolist() == [1, 2, 3, 4, 5]
    assert batch.token_ids_N.tolist() == [3, 4, 5, 8, 9]
    assert batch.temperature_N.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]


def test_a_loss_has_the_columns_and_the_share_of_each_token() -> None:
    loss = micro_batch(SAMPLES, config=LossConfig(denominator=8.0), policy_version=1, device=CPU).loss
    assert loss.cu_seqlens_S.tolist() == [0, 3, 5]
    assert loss.weights_N.tolist() == [0.125, 0.0, 0.125, 0.125, 0.125]
    assert loss.loss_mask_N.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert loss.is_current_N.tolist() == [True, True, True, False, False]
    assert loss.advantages_N is not None
    assert loss.advantages_N.tolist() == [1.0, 1.0, 1.0, 0.5, -0.5]
    missing = (loss.old_log_probs_N, loss.ref_log_probs_N, loss.values_N, loss.returns_N)
    assert missing == (None, None, None, None)


def test_only_tokens_of_the_version_in_training_are_current() -> None:
    spans = [VersionSpan(num_tokens=1, policy_version=4), VersionSpan(num_tokens=2, policy_version=6)]
    samples = decode_samples([make_sample(policy_version=6, version_spans=spans), make_sample(policy_version=6)]).select([0, 1])
    for version, current in ((6, [False, True, True, True, True, True]), (7, [False] * 6)):
        loss = micro_batch(samples, config=LossConfig(denominator=8.0), policy_version=version, device=CPU).loss
        assert loss.is_current_N.tolist() == current


@pytest.mark.parametrize("spans", [[(2, 6)], [(1, 6), (2, 4)], [(1, 4), (2, 5)], [(1, 7), (2, 6)]])
def test_spans_that_do_not_cover_a_completion_up_to_its_version_are_refused(spans: list[tuple[int, int]]) -> None:
    sample = make_sample(policy_version=6)
    sample.version_spans.extend(VersionSpan(num_tokens=num, policy_version=version) for num, version in spans)
    with refusing("samples[1].version_spans"):
        decode_samples([make_sample(), sample])


@pytest.mark.parametrize("aggregation", [kind for kind in Aggregation if kind is not Aggregation.CONSTANT])
def test_a_sample_weighs_the_same_whatever_shares_its_micro_batch(aggregation: Aggregation) -> None:
    config = LossConfig(aggregation=aggregation, denominator=2.0)
    together = micro_batch(SAMPLES, config=config, policy_version=1, device=CPU).loss.weights_N
    alone = [micro_batch(SAMPLES.select([i]), config=config, policy_version=1, device=CPU).loss.weights_N for i in (0, 1)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_a_rank_without_samples_gets_one_token_that_counts_nothing() -> None:
    batch = micro_batch(SAMPLES.select([]), config=LossConfig(denominator=1.0), policy_version=0, device=CPU)
    assert batch.tokens.input_ids_T.shape == (1,)
    assert batch.tokens.cu_seqlens_S.tolist() == [0, 1]
    assert batch.tokens.places_N.shape == batch.loss.loss_mask_N.shape == batch.loss.weights_N.shape == (0,)
    assert batch.loss.cu_seqlens_S.tolist() == [0]


def test_tensors_do_not_share_the_memory_of_a_message() -> None:
    batch = micro_batch(SAMPLES, config=LossConfig(denominator=1.0), policy_version=0, device=CPU)
    batch.loss.loss_mask_N.zero_()
    batch.tokens.temperature_N.zero_()
    assert SAMPLES.columns["loss_mask"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert SAMPLES.columns["temperature"].tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]


def test_parts_of_the_tokens_make_up_the_whole() -> None:
    whole, parts = (
        token_batch(SAMPLES, device=CPU),
        [token_batch(SAMPLES, device=CPU, part=SequencePart(i, 4)) for i in range(4)],
    )
    # Six tokens and then two dummies, in a sequence from which nothing is predicted.
    assert [part.input_ids_T.tolist() for part in parts] == [[1, 2], [3, 4], [7, 8], [0, 0]]
    assert [part.position_ids_T.tolist() for part in parts] == [[0, 1], [2, 3], [0, 1], [0, 1]]
    assert [part.places_N.tolist() for part in parts] == [[1], [0, 1], [0, 1], []]
    for part in parts:
        assert part.cu_seqlens_S.tolist() == [0, 4, 6, 8]
        assert (part.max_seqlen, part.num_places) == (4, (1, 2, 2, 0))
    for name in ("token_ids_N", "temperature_N"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_ranks_that_share_nothing_have_a_token_each() -> None:
    for index in range(3):
        batch = token_batch(SAMPLES.select([]), device=CPU, part=SequencePart(index, 3))
        assert batch.input_ids_T.tolist() == [0]
        assert (batch.cu_seqlens_S.tolist(), batch.num_places) == ([0, 3], (0, 0, 0))
