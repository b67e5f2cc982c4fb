"""Calls of the training loop to a node, with their order and numbers, for every kind of run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasuki.algorithms import advantages
from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.dataset import Dataset
from tasuki.client.estimation import Estimator
from tasuki.client.types import Role
from tasuki.config.train_schema import AdvantageConfig, TrainConfig
from tests.unit.loop_node import ROWS, LoopClient, changed, equal, keys, loop_of, steps_of, train_config


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    return train_config(tmp_path)


def test_a_step_of_grpo_is_one_generation_and_one_update(settings: TrainConfig):
    client = LoopClient()
    (step,) = steps_of(loop_of(client, settings))
    assert client.verbs() == [
        "acquire ROLLOUT", "generate", "begin_acquire TRAIN", "acquire TRAIN", "forward_backward", "optim_step", "export_model",
    ]  # fmt: skip
    (update,) = client.of("forward_backward")
    assert (update.loss, len(update.samples)) == (settings.policy_loss(), 12)
    expected = advantages.group_mean(np.arange(4.0)[None], std="sample")[0]
    for number, sample in enumerate(update.samples):
        assert sample.advantages == pytest.approx(expected[number % 4])
        assert (sample.temperature, sample.policy_version) == (0.5, 0)
        np.testing.assert_array_equal(sample.rollout_log_probs, np.full(3, -0.5, dtype=np.float32))
        assert list(sample.prompt_token_ids) == [sample.completion_token_ids[0]]
    assert (step.num_policy_steps, step.policy_version, step.next_version(), step.mean_reward) == (1, 0, 1, 1.5)
    assert (client.of("optim_step")[0].schedule_step, client.of("optim_step")[0].schedule_steps) == (0, settings.num_steps)


@pytest.mark.parametrize("has_greedy", [False, True])
def test_the_changeover_to_train_begins_before_the_rewards(settings: TrainConfig, has_greedy: bool):
    client, seen = LoopClient(), list[list[str]]()

    def reward(prompt: int, number: int) -> float:
        seen.append(client.verbs())
        return float(number)

    steps_of(loop_of(client, remax(settings) if has_greedy else settings, reward=reward))
    assert all(verbs == ["acquire ROLLOUT", *["generate"] * (1 + has_greedy), "begin_acquire TRAIN"] for verbs in seen)


def test_dapo_begins_it_with_the_last_batch_that_may_be_generated(settings: TrainConfig):
    def reward(prompt: int, number: int) -> float:
        seen.append((len(client.of("generate")), "begin_acquire TRAIN" in client.verbs()))
        return 1.0

    client, seen = LoopClient(), list[tuple[int, bool]]()
    steps_of(loop_of(client, dapo(settings, max_batches=2), reward=reward))
    assert set(seen) == {(1, False), (2, True)}
    client = LoopClient()
    steps_of(loop_of(client, dapo(settings)))
    assert len(client.of("generate")) == 1 and "begin_acquire TRAIN" not in client.verbs(), (
        "the rewards say that it was the last"
    )


@pytest.mark.parametrize("kind", ["grpo", "dapo", "remax", "ppo"])
def test_the_changeover_to_rollout_begins_with_the_end_of_the_last_update(settings: TrainConfig, kind: str):
    """The changeover begins before the step is reported, in every step but the last."""
    twice = changed(settings, num_mini_batches=2)
    own = {"grpo": twice, "dapo": dapo(twice), "remax": remax(settings), "ppo": ppo(twice)}[kind]
    own = changed(own, num_steps=3)
    client, reported = LoopClient(), list[list[str]]()
    loop_of(client, own).run(lambda step: reported.append(client.verbs()))
    for verbs in reported[:2]:
        assert verbs[-2:] == ["optim_step", "begin_acquire ROLLOUT"]
    assert client.verbs().count("begin_acquire ROLLOUT") == client.verbs().count("acquire ROLLOUT") - 1 == 2
    assert client.verbs()[-2:] == ["optim_step", "export_model"], "nothing is generated any more"


def test_groups_that_all_agree_teach_nothing(settings: TrainConfig):
    client = LoopClient()
    (step,) = steps_of(loop_of(client, settings, reward=equal))
    assert client.verbs() == ["acquire ROLLOUT", "generate", "begin_acquire TRAIN", "export_model"]
    assert (step.num_equal_groups, step.num_policy_steps, step.mean_reward) == (3, 0, 1.0)
    assert (step.metrics["signal_fraction"], step.why_no_update) == (0.0, "3 of 3 groups have equal rewards")


@pytest.mark.parametrize(
    ("own", "needs_reference"),
    [
        ({"loss": LossConfig(kl_coef=0.1)}, True),
        ({"loss": LossConfig(entropy_coef=0.1)}, False),
        ({"advantages": AdvantageConfig(kl_coef=0.1)}, True),
    ],
)
def test_groups_that_agree_are_trained_on_where_more_than_the_reward_is_learned(
    settings: TrainConfig, own: dict[str, Any], needs_reference: bool
):
    client = LoopClient(num_tokens=lambda prompt, number: 3 + number)  # so that the KL divergence is not zero
    steps_of(loop_of(client, changed(settings, **own), reward=equal))
    (update,) = client.of("forward_backward")
    assert len(update.samples) == 12
    assert bool(client.of("log_probs", Role.REFERENCE)) == needs_reference


EQUAL_REWARDS = (
    (AdvantageConfig(estimator=Estimator.GREEDY_BASELINE), LossConfig(loss=PolicyGradientLoss())),
    (AdvantageConfig(estimator=Estimator.GLOBALLY_WHITENED), LossConfig()),
    (AdvantageConfig(estimator=Estimator.BATCH_BASELINE), LossConfig()),
)


@pytest.mark.parametrize(("estimator", "loss"), EQUAL_REWARDS)
@pytest.mark.parametrize("term", [None, "kl_coef", "entropy_coef"])
def test_a_batch_whose_advantages_are_all_0_makes_no_update_unless_the_loss_has_another_term(
    settings: TrainConfig, estimator: AdvantageConfig, loss: LossConfig, term: str | None
):
    client = LoopClient()
    own = changed(settings, advantages=estimator, loss=loss if term is None else replace(loss, **{term: 0.1}))
    (step,) = steps_of(loop_of(client, own, reward=lambda prompt, number: 0.1))
    assert len(client.of("forward_backward")) == len(client.of("optim_step")) == step.num_policy_steps == (term is not None)


def test_a_critic_learns_from_a_batch_that_moves_no_policy(settings: TrainConfig):
    client = LoopClient()
    own = ppo(settings)
    whiten = changed(own, advantages=own.advantages.model_copy(update={"whiten": True}))
    (step,) = steps_of(loop_of(client, whiten, reward=lambda prompt, number: 0.1))
    assert (step.num_critic_steps, step.num_policy_steps) == (1, 0)


def ppo(settings: TrainConfig, **own: Any) -> TrainConfig:
    estimator = AdvantageConfig(estimator=Estimator.GAE, whiten=False)
    return changed(settings, advantages=estimator, value_loss=ValueLoss(clip=0.2), **own)


def test_ppo_has_values_first_and_updates_the_critic_before_the_policy(settings: TrainConfig):
    client = LoopClient()
    (step,) = steps_of(loop_of(client, ppo(settings)))
    assert client.verbs()[3:8] == [
        "acquire TRAIN", "values", "forward_backward CRITIC", "optim_step CRITIC", "forward_backward",
    ]  # fmt: skip
    critic, policy = client.of("forward_backward", Role.CRITIC)[0], client.of("forward_backward")[0]
    assert isinstance(critic.loss.loss, ValueLoss) and isinstance(policy.loss.loss, PpoLoss)
    for number, sample in enumerate(critic.samples):
        # With discount and lambda of 1, every token's return is the reward.
        np.testing.assert_allclose(sample.returns, np.full(3, number % 4))
        np.testing.assert_allclose(sample.values, np.full(3, 0.25))
        np.testing.assert_allclose(sample.advantages, np.full(3, number % 4 - 0.25))
    assert keys(critic.samples) == keys(policy.samples)
    assert {"critic/size", "critic/grad_norm", "explained_variance"} <= step.metrics.keys()
    assert (step.grad_norm, step.num_policy_steps) == (2.0, 1)


def test_the_critic_alone_learns_while_it_warms_up(settings: TrainConfig):
    client = LoopClient()
    steps = steps_of(loop_of(client, ppo(settings, num_steps=3, critic_warmup_steps=2)))
    assert [step.num_policy_steps for step in steps] == [0, 0, 1]
    assert [step.policy_version for step in steps] == [0, 0, 0]
    assert len(client.of("optim_step", Role.CRITIC)) == 3
    assert [call.schedule_step for call in client.of("optim_step", Role.CRITIC)] == [0, 1, 2]
    assert [call.schedule_step for call in client.of("optim_step")] == [0], "the policy's warm-up is its own"


def remax(settings: TrainConfig) -> TrainConfig:
    estimator = AdvantageConfig(estimator=Estimator.GREEDY_BASELINE)
    return changed(settings, advantages=estimator, loss=LossConfig(loss=PolicyGradientLoss()))


def dapo(settings: TrainConfig, **own: Any) -> TrainConfig:
    return changed(settings, **{"max_batches": 4, **own})


def test_dynamic_sampling_takes_prompts_until_enough_groups_differ(settings: TrainConfig):
    client, dataset = LoopClient(), Dataset(ROWS)
    loop = loop_of(client, dapo(settings), reward=lambda prompt, number: (prompt % 2) * number, dataset=dataset)
    (step,) = steps_of(loop)
    (update,) = client.of("forward_backward")
    assert len(update.samples) == 12
    assert all(prompt % 2 for prompt, *_ in keys(update.samples))
    num_prompts = sum(len(call.prompts) for call in client.of("generate"))
    assert step.metrics["num_generated_groups"] == num_prompts > 3
    assert step.num_equal_groups == num_prompts - 3
    assert (step.metrics["signal_fraction"], step.why_no_update) == (pytest.approx(3 / num_prompts), "")
    # Only rows that no step has seen follow.
    again = Dataset(ROWS)
    again.next_rows(num_prompts)
    assert step.position == again.position() == dataset.position()
