"""Samples of a step: which are trained on, in which mini-batches, their figures, and their files on disk."""

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tasuki.algorithms import advantages
from tasuki.client.dataset import Dataset
from tasuki.config.train_schema import EvalConfig, TrainConfig
from tests.unit.loop_node import ROWS, LoopClient, changed, keys, loop_of, steps_of, train_config

NAN = float("nan")


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    return train_config(tmp_path)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_every_epoch_has_every_sample_once_and_old_log_probs_are_computed_once(settings: TrainConfig, num_epochs: int):
    own = changed(settings, num_epochs=num_epochs, num_mini_batches=5)
    client = LoopClient()
    (step,) = steps_of(loop_of(client, own))
    updates = client.of("forward_backward")
    assert len(updates) == len(client.of("optim_step")) == 5 * num_epochs == step.num_policy_steps
    assert len(client.of("log_probs")) == 1
    assert client.verbs().index("log_probs") < client.verbs().index("forward_backward")
    for epoch in range(num_epochs):
        seen = Counter(key for call in updates[5 * epoch : 5 * epoch + 5] for key in keys(call.samples))
        assert len(seen) == 12 and set(seen.values()) == {1}
    assert all(sample.old_log_probs[0] == -0.625 for call in updates for sample in call.samples)
    assert step.metrics["size_max"] == 3.0
    assert step.metrics["size"] == pytest.approx(12 / 5)


def test_mini_batches_are_shuffled_by_seed_step_and_epoch(settings: TrainConfig):
    def orders(seed: int) -> list[list[tuple[int, int]]]:
        client = LoopClient()
        own = changed(settings, num_steps=2, num_epochs=2, num_mini_batches=3)
        steps_of(loop_of(client, own, dataset=Dataset(ROWS[:3], seed=seed)))
        numbers = [
            [(int(s.completion_token_ids[0]), int(s.completion_token_ids[2])) for s in c.samples]
            for c in client.of("forward_backward")
        ]
        return [list(chain(*numbers[start : start + 3])) for start in range(0, 12, 3)]

    assert orders(0) == orders(0)
    assert len({str(order) for order in orders(0)}) == 4
    assert orders(0) != orders(1)


def test_completions_that_were_cut_count_in_the_baseline_and_not_in_the_loss(settings: TrainConfig):
    client = LoopClient(num_tokens=lambda _, number: 8 if number == 0 else 3)
    (step,) = steps_of(loop_of(client, changed(settings, mask_truncated=True, num_mini_batches=12)))
    updates = client.of("forward_backward")
    assert len(updates) == 9  # samples without a counted token are left out
    expected = advantages.group_mean(np.arange(4.0)[None], std="sample")[0]
    assert {sample.completion_token_ids[2]: sample.advantages for call in updates for sample in call.samples} == {
        number: pytest.approx(expected[number]) for number in (1, 2, 3)
    }
    assert step.metrics["truncated_fraction"] == 0.25


def test_empty_completions_and_failed_rewards_are_left_out(settings: TrainConfig):
    client = LoopClient(num_tokens=lambda prompt, number: 0 if number == 1 else 3)
    (step,) = steps_of(loop_of(client, settings, reward=lambda prompt, number: NAN if number == 2 else number))
    (update,) = client.of("forward_backward")
    expected = advantages.group_mean(np.array([[0.0, 1.0, NAN, 3.0]]), std="sample")[0]
    assert [sample.advantages for sample in update.samples] == [pytest.approx(expected[number]) for number in (0, 3)] * 3
    assert (step.num_failed_rewards, step.mean_reward) == (3, pytest.approx(4 / 3))


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        ({4}, "2 of 3 groups have equal rewards, 1 of 3 groups have failed rewards"),
        ({4, 6, 19}, "3 of 3 groups have failed rewards"),
    ],
)
def test_groups_whose_rewards_failed_are_not_told_as_equal(settings: TrainConfig, failing: set[int], why: str):
    fails = {(prompt, number) for prompt in failing for number in range(3)}
    (step,) = steps_of(loop_of(LoopClient(), settings, reward=lambda *of: NAN if of in fails else 1.0))
    assert (step.metrics["signal_fraction"], step.why_no_update) == (0.0, why)


def test_a_step_whose_rewards_all_failed_has_no_mean_reward(settings: TrainConfig):
    (step,) = steps_of(loop_of(LoopClient(), settings, reward=lambda prompt, number: NAN))
    assert (step.num_failed_rewards, step.num_policy_steps, step.mean_reward) == (12, 0, None)
    assert (step.is_evaluation, step.why_no_update) == (False, "every reward failed")


def test_evaluation_samples_as_it_is_told_and_reports_pass_at_k(settings: TrainConfig):
    client = LoopClient()
    evaluation = EvalConfig(num_samples=4, temperature=0.75, pass_at=(1, 4))
    own = changed(settings, eval=evaluation, num_steps=2, eval_every=1, stop=("</answer>",))
    (first, _) = steps_of(loop_of(client, own, eval_rows=ROWS[:2]))
    asked = client.of("generate")[0]
    assert (asked.sampling.temperature, asked.sampling.max_new_tokens, len(asked.prompts)) == (0.75, 8, 2)
    assert (first.eval_score, first.metrics["eval/pass@1"], first.metrics["eval/pass@4"]) == (1.5, 0.75, 1.0)
    assert [asked.sampling.stop for asked in client.of("generate")] == [("</answer>",)] * 5


def test_a_score_that_is_reached_ends_the_run(settings: TrainConfig):
    client, steps = LoopClient(), []
    own = changed(settings, num_steps=9, stop_at_eval_score=0.0)
    loop_of(client, own, eval_rows=ROWS[:2]).run(steps.append)
    assert [(step.eval_score, step.mean_reward) for step in steps] == [(0.0, None)]
    assert client.verbs() == ["acquire ROLLOUT", "generate", "export_model"]
