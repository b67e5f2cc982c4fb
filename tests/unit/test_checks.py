"""Checks of a call's samples: the first wrong field is named with its sample."""

from dataclasses import replace
from typing import Any

import pytest

from tasuki.algorithms.loss_types import LossConfig, OldPolicy
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.config.trainer_schema import LoraConfig
from tasuki.trainer.data.checks import BatchLimits, check_denominator, check_loss, check_sequences, check_share, check_versions
from tasuki.trainer.service.requests import check_linearized, decode_samples
from tasuki.trainer.service.training import Training
from tasuki.trainer.wire import Role
from tasuki.v1.trainer_pb2 import ForwardBackwardHeader
from tasuki.v1.types_pb2 import ROLE_REFERENCE, TrainingSample
from tasuki.wire.errors import InvalidArgument, VersionOrder
from tests.refusal import refusing
from tests.unit.training_samples import make_sample

LIMITS = BatchLimits(vocab_size=10, context_length=8, micro_batch_tokens=7)
NAN, INF = float("nan"), float("inf")


def check_all(messages: list[TrainingSample], *, config: LossConfig | None = None, role: Role = Role.POLICY) -> None:
    samples = decode_samples(messages)
    check_sequences(samples, limits=LIMITS)
    check_loss(samples, config=config or LossConfig(), role=role)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"prompt_token_ids": []}, "samples[1].prompt_token_ids", "empty"),
        ({"completion_token_ids": [], "rollout_log_probs": []}, "samples[1].completion_token_ids", "empty"),
        ({"prompt_token_ids": [1, 10]}, "samples[1].prompt_token_ids[1]", "not a token id"),
        ({"completion_token_ids": [3, -1, 5]}, "samples[1].completion_token_ids[1]", "not a token id"),
        ({"prompt_token_ids": [1] * 6}, "samples[1]", "9 tokens, above the model's context length of 8"),
        ({"prompt_token_ids": [1] * 5}, "samples[1]", "8 tokens, above trainer.micro_batch_tokens of 7"),
        ({"rollout_log_probs": [-0.1]}, "samples[1].rollout_log_probs", "has 1 entries; give 3"),
        ({"rollout_log_probs": [-0.1, NAN, 0]}, "samples[1].rollout_log_probs[1]", "nan is not finite"),
        ({"rollout_log_probs": [-0.1, 0.3, 0.2]}, "samples[1].rollout_log_probs[1]", "0.3 is above 0"),
        ({"advantages": []}, "samples[1].advantages", "has 0 entries; give 3 or 1"),
        ({"advantages": [1.0, 2.0, NAN]}, "samples[1].advantages[2]", "nan is not finite"),
        ({"loss_mask": [1.0]}, "samples[1].loss_mask", "has 1 entries; give 3 or 0"),
        ({"loss_mask": [1.0, 0.5, 0.0]}, "samples[1].loss_mask[1]", "neither 0 nor 1"),
        ({"ref_log_probs": [-0.1] * 2}, "samples[0].ref_log_probs", "has 0 entries"),
        ({"old_log_probs": [-0.1] * 3}, "samples[0].old_log_probs", "in every sample or in none"),
        ({"temperature": 0.0}, "samples[1].temperature", "0 is out of range; give a finite number of at least 1e-06"),
        ({"temperature": NAN}, "samples[1].temperature", "nan is out"),
        ({"temperature": 9e-7}, "samples[1].temperature", "9e-07 is out"),
    ],
)
def test_a_wrong_field_is_named_with_its_sample(fields: dict[str, Any], field: str, words: str) -> None:
    with refusing(field) as raised:
        check_all([make_sample(), make_sample(**fields), make_sample()])
    assert words in raised.value.message


def test_a_denominator_below_the_calls_own_count_is_refused_for_an_auxiliary_loss() -> None:
    samples = decode_samples([make_sample(), make_sample()])
    for denominator in (None, 6.0, 12.0):
        check_denominator(samples, config=LossConfig(denominator=denominator))
    with refusing("header.loss.settings.denominator", match=r"is 1, but the call alone counts 6"):
        check_denominator(samples, config=LossConfig(denominator=1.0))


@pytest.mark.parametrize("field", ["rollout_log_probs", "old_log_probs", "ref_log_probs"])
def test_log_probs_may_be_above_0_by_rounding_only(field: str) -> None:
    check_all([make_sample(**{field: [-0.1, 1e-6, 0.0]})])
    with pytest.raises(InvalidArgument, match=rf"samples\[1\]\.{field}\[2\]: 0\.9 is above 0.*natural logarithms"):
        check_all([make_sample(**{field: [-0.1, -0.2, -0.3]}), make_sample(**{field: [-0.1, 0.0, 0.9]})])


@pytest.mark.parametrize(
    ("config", "role", "fields", "column"),
    [
        (LossConfig(), Role.POLICY, {"advantages": []}, "advantages"),
        (LossConfig(kl_coef=0.1), Role.POLICY, {}, "ref_log_probs"),
        (LossConfig(old_policy=OldPolicy.GIVEN), Role.POLICY, {}, "old_log_probs"),
        (LossConfig(loss=ValueLoss(clip=0.2)), Role.CRITIC, {"returns": [0.0] * 3}, "values"),
    ],
)
def test_a_column_that_a_loss_needs_is_named(config: LossConfig, role: Role, fields: dict[str, Any], column: str) -> None:
    with refusing(f"samples[0].{column}"):
        check_all([make_sample(**fields)] * 2, config=config, role=role)


@pytest.mark.parametrize(
    ("config", "role", "words"),
    [
        (LossConfig(loss=ValueLoss()), Role.POLICY, "value is not a loss of the policy"),
        (LossConfig(), Role.CRITIC, "ppo is not a loss of the critic"),
        (LossConfig(loss=SftLoss()), Role.CRITIC, "sft is not a loss of the critic"),
    ],
)
def test_a_loss_of_another_role_is_refused(config: LossConfig, role: Role, words: str) -> None:
    with refusing("header.loss.name", match=words):
        check_all([make_sample(returns=[0.0] * 3, values=[0.0] * 3)], config=config, role=role)


def test_sample_of_a_version_that_the_trainer_never_had_is_refused_by_its_place() -> None:
    messages = [make_sample(policy_version=2), make_sample(policy_version=3), make_sample(policy_version=4)]
    check_versions(decode_samples(messages[:2]), policy_version=3)
    with pytest.raises(VersionOrder, match=r"samples\[2\].policy_version: 4 is above the trainer's 3") as refused:
        check_versions(decode_samples(messages), policy_version=3)
    assert refused.value.metadata == {"have": "3", "want": "4"}


def test_a_fleets_share_may_be_empty_but_needs_the_calls_divisor() -> None:
    check_share(decode_samples([]), config=LossConfig(denominator=3.0), role=Role.POLICY, limits=LIMITS)
    with refusing("header.loss.settings.denominator"):
        check_share(decode_samples([make_sample()]), config=LossConfig(), role=Role.POLICY, limits=LIMITS)


def test_an_adapter_that_starts_the_policy_leaves_no_reference_to_score_with() -> None:
    """The model without it, such as PiSSA's residual, is not what the policy starts from."""
    training = Training(Any, state=Any, limits=replace(LIMITS, starts_from_adapter=True), costs={})
    with refusing("header.role"):
        training.decode_scored(ROLE_REFERENCE, [make_sample()])


def test_a_loss_in_python_has_no_gradient_under_dropout() -> None:
    """Its log-probs are computed without, and the backward pass would drop inputs."""
    header = ForwardBackwardHeader(linearized_at=3)
    check_linearized(header, policy_version=3, lora=LoraConfig(rank=4))
    check_linearized(ForwardBackwardHeader(), policy_version=3, lora=LoraConfig(rank=4, dropout=0.1))
    with refusing("trainer.lora.dropout"):
        check_linearized(header, policy_version=3, lora=LoraConfig(rank=4, dropout=0.1))
