"""Point at which an interrupted run continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import LoopState
from tasuki.client.step import Step
from tasuki.runs.continuation import Continuation, continuation
from tasuki.runs.earlier_run import EarlierRun, RunHead
from tasuki.wire.errors import VersionOrder

CHECKPOINT = Path("/run/checkpoints/version-000004")
ROWS = [{"prompt": str(number)} for number in range(10)]


def step(number: int, *, version: int | None = None) -> Step:
    """A step that learned."""
    return Step(number, policy_version=number if version is None else version, mean_reward=0.5, num_policy_steps=1)


def earlier(*steps: Step, saved: Step | None = None) -> EarlierRun:
    loop = None if saved is None else LoopState(saved, {"seed": 0, "epoch": 0, "next": 8, "num_rows": 10})
    return EarlierRun(RunHead("run", 0, {}), steps, None if saved is None else CHECKPOINT, loop)


def numbers(found: Continuation) -> list[int]:
    return [one.step for one in found.steps]


STEPS = [step(number) for number in range(7)]
SAVED = earlier(*STEPS, saved=step(3))


def test_a_fresh_node_gets_the_checkpoint_and_later_lines_are_dropped():
    found = continuation(SAVED, node_version=0, is_of_run=False)
    assert (found.first_step, found.checkpoint, numbers(found)) == (4, CHECKPOINT, [0, 1, 2, 3])


def test_weights_that_no_node_has_any_more_and_no_checkpoint_are_told():
    begun_at_5 = EarlierRun(RunHead("run", 5, {}), [step(0, version=5)], None, None)
    with pytest.raises(VersionOrder, match=r"began at policy version 5, .* left no checkpoint: restart it"):
        continuation(begun_at_5, node_version=0, is_of_run=False)


def test_a_line_that_only_the_checkpoint_has_is_there():
    found = continuation(earlier(*STEPS[:3], saved=step(3)), node_version=0, is_of_run=False)
    assert numbers(found) == [0, 1, 2, 3]


def test_a_node_that_has_all_that_the_lines_tell_goes_on_after_them():
    found = continuation(SAVED, node_version=7, is_of_run=True)
    assert (found.first_step, found.checkpoint, found.num_steps_after_position) == (7, None, 3)
    assert numbers(found) == list(range(7))


def test_a_step_whose_line_was_lost_is_there_without_figures():
    found = continuation(SAVED, node_version=8, is_of_run=True)
    assert (found.first_step, found.checkpoint, numbers(found)) == (8, None, list(range(8)))
    assert (found.steps[-1].policy_version, found.steps[-1].mean_reward) == (7, None)
    again = continuation(earlier(*found.steps, saved=step(3)), node_version=8, is_of_run=True)
    assert again == found


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_node_at_the_checkpoints_version_gets_the_checkpoint(is_of_run: bool):
    found = continuation(SAVED, node_version=4, is_of_run=is_of_run)
    assert (found.first_step, found.checkpoint) == (4, CHECKPOINT)


@pytest.mark.parametrize(("version", "is_of_run"), [(7, False), (5, False), (9, True), (6, True)])
def test_a_node_that_is_ahead_otherwise_is_refused_with_what_to_do(version: int, is_of_run: bool):
    with pytest.raises(VersionOrder, match=r"policy version \d, .*has 4 in .*tasuki down CONFIG") as refused:
        continuation(SAVED, node_version=version, is_of_run=is_of_run)
    assert refused.value.metadata == {"have": str(version), "want": "4"}


def test_without_a_checkpoint_it_begins_again_where_the_run_began():
    found = continuation(earlier(*STEPS[:2]), node_version=0, is_of_run=False)
    assert (found.first_step, found.checkpoint, numbers(found)) == (0, None, [])
    with pytest.raises(VersionOrder, match="began at 0"):
        continuation(earlier(*STEPS[:2]), node_version=2, is_of_run=False)


def test_without_a_checkpoint_a_node_of_the_run_goes_on():
    found = continuation(earlier(*STEPS[:2]), node_version=2, is_of_run=True)
    assert (found.first_step, found.checkpoint, numbers(found)) == (2, None, [0, 1])


def several(number: int, *, version: int, num_policy_steps: int, position: int | None = None) -> Step:
    """A step with several optimizer steps. position: of the next row."""
    place = {} if position is None else {"seed": 0, "epoch": 0, "next": position, "num_rows": 10}
    return Step(number, policy_version=version, mean_reward=0.5, num_policy_steps=num_policy_steps, position=place)


TWO = [several(0, version=0, num_policy_steps=2, position=2), several(1, version=2, num_policy_steps=2, position=5)]


def begun(*steps: Step, pending: Step | None = None) -> EarlierRun:
    return EarlierRun(RunHead("run", 0, {}), steps, None, None, pending)


def test_a_step_of_several_updates_counts_as_many_versions():
    assert continuation(begun(*TWO), node_version=4, is_of_run=True).first_step == 2
    saved = earlier(*TWO, saved=TWO[0])
    assert saved.saved_version == 2
    assert continuation(saved, node_version=2, is_of_run=False).first_step == 1


@pytest.mark.parametrize("num_made", [1, 2, 3])
def test_a_client_that_ended_between_two_updates_goes_on_after_its_step(num_made: int):
    third = several(2, version=4, num_policy_steps=0, position=9)
    third.estimator, third.metrics = {"baseline_total": 1.0}, {"size": 1.0}
    found = continuation(begun(*TWO, pending=third), node_version=4 + num_made, is_of_run=True)
    assert (found.first_step, found.checkpoint, numbers(found)) == (3, None, [0, 1, 2])
    last = found.steps[-1]
    assert (last.num_policy_steps, last.next_version(), last.mean_reward) == (num_made, 4 + num_made, None)
    assert (last.estimator, last.metrics) == ({"baseline_total": 1.0}, {})
    assert next_rows(found) == ["9"]
    # It ended again before the next step had a line.
    again = continuation(begun(*found.steps, pending=third), node_version=4 + num_made, is_of_run=True)
    assert again == found


def next_rows(found: Continuation) -> list[object]:
    """Number of the next row, in the order of the data."""
    dataset, order = Dataset(ROWS, seed=0), Dataset(ROWS, seed=0)
    found.seek(dataset, rows_per_step=3)
    (row,) = dataset.next_rows(1)
    return [str(order.next_rows(10).index(row))]


def test_a_step_before_its_first_update_is_made_again():
    pending = several(2, version=4, num_policy_steps=0, position=9)
    found = continuation(begun(*TWO, pending=pending), node_version=4, is_of_run=True)
    assert (found.first_step, numbers(found), next_rows(found)) == (2, [0, 1], ["5"])


def test_a_checkpoints_place_counts_where_the_node_gets_the_checkpoint():
    saved = earlier(*STEPS, saved=step(3))
    assert next_rows(continuation(saved, node_version=0, is_of_run=False)) == ["8"]


def warm_up(number: int) -> Step:
    """A step in which only the critic learned."""
    return Step(number, policy_version=0, mean_reward=0.5, critic_version=number, num_critic_steps=1)


WARM_UP = [warm_up(number) for number in range(4)]


def test_a_step_of_the_critic_whose_line_was_lost_is_not_made_again():
    third = replace(warm_up(4), num_critic_steps=0, position=TWO[1].position)
    found = continuation(begun(*WARM_UP, pending=third), node_version=0, critic_version=6, is_of_run=True)
    assert (found.first_step, found.checkpoint, numbers(found)) == (5, None, [0, 1, 2, 3, 4])
    last = found.steps[-1]
    assert (last.critic_version, last.num_critic_steps, last.num_policy_steps) == (4, 2, 0)
    assert next_rows(found) == ["5"]
    # It ended again before the next step had a line.
    again = continuation(begun(*found.steps, pending=third), node_version=0, critic_version=6, is_of_run=True)
    assert again == found


def test_a_step_before_the_critics_first_update_is_made_again():
    third = replace(warm_up(4), num_critic_steps=0)
    found = continuation(begun(*WARM_UP, pending=third), node_version=0, critic_version=4, is_of_run=True)
    assert (found.first_step, numbers(found)) == (4, [0, 1, 2, 3])


@pytest.mark.parametrize("pending", [None, replace(warm_up(4), num_critic_steps=0)])
def test_a_fresh_node_goes_on_from_the_critics_latest_checkpoint(pending: Step | None):
    saved = replace(earlier(*WARM_UP, saved=WARM_UP[2]), pending=pending)
    found = continuation(saved, node_version=0, critic_version=0, is_of_run=False)
    assert (found.first_step, found.checkpoint, numbers(found)) == (3, CHECKPOINT, [0, 1, 2])
