"""Advantages by turn: returns, groups in which episodes take different numbers of turns, and what stays as it was."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tasuki.algorithms.setting import Estimator
from tasuki.client.encode import training_sample_to_proto
from tasuki.client.episode import Episode, credit_turns
from tasuki.client.estimation import EstimatorState, Group, estimate_advantages
from tasuki.client.policy import Policy, Reply
from tasuki.client.turns import Turn, Turns
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.config.train_schema import AdvantageConfig
from tests.refusal import refusing


def episode(num_turns: int, reward: float, turn_rewards: dict[str, float] | None = None, failure: str = "") -> Episode:
    """Turns of two tokens each, with one token of the user between them."""
    turns, parent = Turns(), None
    for _ in range(num_turns):
        sample = Sample(0, 0, np.array([5, 6], np.int32), np.zeros(2, np.float32), FinishReason.STOP, 0)
        parent = Turn(parent, np.array([9], np.int32), sample)
        turns.turns.append(parent)
    return Episode(0, {}, turns, reward=reward, turn_rewards=turn_rewards or {}, failure=failure)


def estimated(group: list[Episode], **settings: object) -> list[TrainingSample]:
    samples = [sample for one in group for sample in one.training_samples()]
    places = [place for place, one in enumerate(group) for _ in one.training_samples()]
    return estimate_advantages(
        samples,
        rewards_PG=np.array([[one.reward for one in group]]),
        places=places,
        greedy_rewards_P=None,
        settings=AdvantageConfig(**{"std": "none", **settings}),
        state=EstimatorState(),
    ).samples


def test_a_turns_tokens_have_its_discounted_return_beside_those_of_the_same_turn() -> None:
    group = [episode(2, 3.0, {"0": 1.0, "1": 2.0}), episode(1, 4.0), episode(2, 0.0, failure="raised")]
    credit_turns(group, discount=0.5, failed=0.0)
    assert [one.turn_returns.tolist() for one in group] == [[2.0, 2.0], [4.0], [0.0, 0.0]]
    sent = [training_sample_to_proto(sample, index=index) for index, sample in enumerate(estimated(group))]
    first, second, third = (list(sample.advantages) for sample in sent)
    assert (first, second, third) == ([0.0, 0.0, 0.0, 1.0, 1.0], [2.0, 2.0], [-2.0, -2.0, 0.0, -1.0, -1.0])


def test_rewards_of_turns_are_what_rewards_may_be() -> None:
    async def ask(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"turn": 0, **dict.fromkeys(Reply.__slots__)}

    policy = Policy(ask)
    with pytest.raises(ValueError, match="after a turn of the policy"):
        policy.reward(1.0)
    asyncio.run(policy.generate([1]))
    policy.reward(np.float32(0.5))
    policy.reward(True)
    assert json.dumps(policy.turn_rewards) == '{"0": 1.5}'
    for value in (float("inf"), 1e16, None, "1", 10**400):
        with pytest.raises(ValueError, match="give a number of at most 1e"):
            policy.reward(value)


def test_an_answer_without_room_is_rewarded_with_the_turn_before_it_or_the_first() -> None:
    turns: list[dict[str, Any]] = [{}, {"turn": 0}, {"turn": 1}, {}]  # an episode's first prompt may already be too long

    async def ask(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**turns.pop(0), **dict.fromkeys(Reply.__slots__)}

    policy = Policy(ask)
    for value in (1.0, 2.0, 4.0, 8.0):
        asyncio.run(policy.generate([1]))
        policy.reward(value)
    assert policy.turn_rewards == {0: 3.0, 1: 12.0}
    without = [episode(0, 1.0, {"0": 1.0}), episode(1, 2.0)]
    credit_turns(without, discount=1.0, failed=0.0)
    assert [one.turn_returns.tolist() for one in without] == [[], [2.0]]


def test_a_group_without_rewards_of_turns_is_estimated_by_trajectory() -> None:
    group = [episode(2, 3.0), episode(1, 1.0)]
    credit_turns(group, discount=0.5, failed=0.0)
    assert [sample.advantages for sample in estimated(group)] == [1.0, -1.0]


def test_turns_that_differ_under_equal_sums_teach() -> None:
    group = [episode(2, 1.0, {"0": 1.0}), episode(2, 1.0, {"1": 1.0})]
    credit_turns(group, discount=1.0, failed=0.0)
    branches = [one.training_samples() for one in group]
    rewards = np.ones(2, np.float32)
    assert Group([], [], rewards, branches=branches).differs()
    assert not Group([], [], rewards, branches=[one.training_samples() for one in (episode(1, 1.0), episode(2, 1.0))]).differs()


@pytest.mark.parametrize("settings", [{"estimator": Estimator.RUNNING_BASELINE}])
def test_estimators_without_turns_are_refused(settings: dict[str, object]) -> None:
    group = [episode(1, 1.0, {"0": 1.0}), episode(1, 0.0)]
    credit_turns(group, discount=1.0, failed=0.0)
    with refusing("train.advantages.estimator"):
        estimated(group, **settings)
