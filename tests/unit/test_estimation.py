"""From a batch's rewards to its samples' advantages: each estimator matches its formula over the samples that count."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tasuki.client.estimation import (
    Estimate,
    Estimator,
    EstimatorState,
    Group,
    estimate_advantages,
    has_loss_tokens,
    training_samples,
)
from tasuki.client.step import truncated_fraction
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.config.train_schema import AdvantageConfig

NAN = float("nan")
REWARDS_PG = np.array([[0.0, 1.0, 4.0], [2.0, 2.0, 5.0]], dtype=np.float32)
LENGTHS = (2, 3, 1, 2, 4, 3)
PLACES = range(6)


def sample(length: int, *, mask: Sequence[float] = (), **columns: float) -> TrainingSample:
    """Makes a sample; each column has one value for all tokens."""
    filled = {name: np.full(length, value, dtype=np.float32) for name, value in columns.items()}
    return TrainingSample([1], list(range(length)), loss_mask=mask, **filled)


def samples(**columns: float) -> list[TrainingSample]:
    return [sample(length, rollout_log_probs=-0.5, **columns) for length in LENGTHS]


def estimate(
    settings: AdvantageConfig,
    *,
    of: Sequence[TrainingSample] | None = None,
    rewards_PG: NDArray[np.float32] = REWARDS_PG,
    places: Sequence[int] = PLACES,
    greedy_rewards_P: Sequence[float] | None = None,
    state: EstimatorState | None = None,
) -> Estimate:
    return estimate_advantages(
        samples() if of is None else of,
        rewards_PG=rewards_PG,
        places=places,
        greedy_rewards_P=None if greedy_rewards_P is None else np.array(greedy_rewards_P),
        settings=settings,
        state=EstimatorState() if state is None else state,
    )


def advantages_of(found: Estimate) -> list[Any]:
    return [each.advantages for each in found.samples]


def flat(found: Estimate) -> NDArray[np.float32]:
    return np.concatenate([np.asarray(each.advantages) for each in found.samples])


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_has_values_in_it_and_gives_returns(lam: float) -> None:
    settings = AdvantageConfig(estimator=Estimator.GAE, lam=lam, discount=0.5, whiten=False)
    found = estimate(settings, of=samples(values=1.0))
    for made, reward, length in zip(found.samples, REWARDS_PG.reshape(-1), LENGTHS, strict=True):
        expected = np.zeros(length)
        following = 0.0
        for t in reversed(range(length)):
            delta = (reward if t == length - 1 else 0.5 * 1.0) - 1.0
            following = expected[t] = delta + 0.5 * lam * following
        np.testing.assert_allclose(made.advantages, expected, rtol=1e-6)
        np.testing.assert_allclose(made.returns, expected + 1.0, rtol=1e-6)
    whitened = estimate(AdvantageConfig(estimator=Estimator.GAE, lam=lam, discount=0.5), of=samples(values=1.0))
    x = flat(found)
    np.testing.assert_allclose(flat(whitened), (x - x.mean()) / x.std(ddof=1), rtol=1e-4, atol=1e-6)
    assert [list(each.returns) for each in whitened.samples] == [list(each.returns) for each in found.samples]


def test_a_masked_token_takes_no_part() -> None:
    masked = sample(3, mask=[1.0, 1.0, 0.0], rollout_log_probs=-0.5, ref_log_probs=-0.5, values=0.0)
    rewards_PG = np.array([[3.0]], dtype=np.float32)
    settings = AdvantageConfig(estimator=Estimator.GAE, whiten=False, discount=0.5)
    (made,) = estimate(settings, of=[masked], rewards_PG=rewards_PG, places=[0]).samples
    np.testing.assert_allclose(made.advantages, [1.5, 3.0, 0.0])


def test_failed_and_empty_completions_are_passed_over() -> None:
    rewards_PG = np.array([[0.0, NAN, 4.0], [2.0, 2.0, 5.0]], dtype=np.float32)
    of = [each for place, each in enumerate(samples()) if place not in (1, 4)]
    for estimator in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT, Estimator.BATCH_BASELINE, Estimator.RUNNING_BASELINE):
        settings = AdvantageConfig(estimator=estimator, std="none")
        found = estimate(settings, of=of, rewards_PG=rewards_PG, places=[0, 2, 3, 5])
        assert len(found.samples) == 4
        assert np.isfinite(advantages_of(found)).all()
    found = estimate(AdvantageConfig(std="none"), of=of, rewards_PG=rewards_PG, places=[0, 2, 3, 5])
    # The empty sample, at position 4, counts in its group's mean.
    np.testing.assert_allclose(advantages_of(found), [-2.0, 2.0, -1.0, 2.0])


def test_the_kl_in_the_reward_is_a_samples_sum() -> None:
    settings = AdvantageConfig(estimator=Estimator.RUNNING_BASELINE, kl_coef=0.5)
    state = EstimatorState.of({"baseline_total": 1.0, "baseline_weight": 1.0})
    found = estimate(settings, of=samples(ref_log_probs=-0.75), state=state)
    expected = REWARDS_PG.reshape(-1) - 0.5 * 0.25 * np.array(LENGTHS) - 1.0
    np.testing.assert_allclose(advantages_of(found), expected, rtol=1e-6)
    assert found.metrics == {"reward_kl": pytest.approx(0.25 * np.mean(LENGTHS)), "reward_kl_coef": 0.5}
    # The baseline continues with the same rewards.
    assert found.state.baseline.total == pytest.approx(0.95 + 0.05 * (expected + 1.0).mean())


def test_the_kl_in_the_reward_is_at_each_token_where_advantages_are() -> None:
    settings = AdvantageConfig(estimator=Estimator.GAE, whiten=False, kl_coef=0.5, lam=1.0)
    found = estimate(settings, of=samples(ref_log_probs=-0.75, values=0.0))
    for made, reward, length in zip(found.samples, REWARDS_PG.reshape(-1), LENGTHS, strict=True):
        np.testing.assert_allclose(made.advantages, reward - 0.125 * np.arange(length, 0, -1), rtol=1e-6)


def test_the_kl_is_to_the_policy_before_the_step_where_that_was_computed() -> None:
    settings = AdvantageConfig(kl_coef=0.5)
    found = estimate(settings, of=samples(ref_log_probs=-0.75, old_log_probs=-0.75))
    assert found.metrics["reward_kl"] == 0.0


def test_the_loss_counts_no_token_of_a_truncated_completion_and_others_keep_their_mask() -> None:
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CUT, FinishReason.LENGTH]
    zeros = np.zeros(2, np.float32)
    drawn = [Sample(0, 0, np.array([2, 3], np.int32), zeros, reason, 0, loss_mask=zeros + 1) for reason in reasons]
    made, _ = training_samples([Group([1], drawn, np.arange(4, dtype=np.float32))], mask_truncated=True)
    assert [list(each.loss_mask) for each in made] == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert has_loss_tokens(made) and not has_loss_tokens([made[1], made[3]])
    assert truncated_fraction(drawn) == 0.5
