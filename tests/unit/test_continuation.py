"""Point at which an interrupted run continues."""

from pathlib import Path

import pytest

from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import LoopState
from tasuki.client.step import Step
from tasuki.runs.earlier_run import EarlierRun, RunHead
from tasuki.runs.resume import Continuation, continuation
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
    assert (found.first_step, found.checkpoint, found.pending) == (7, None, None)
    assert numbers(found) == list(range(7))


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_node_at_the_checkpoints_version_gets_the_checkpoint(is_of_run: bool):
    found = continuation(SAVED, node_version=4, is_of_run=is_of_run)
    assert (found.first_step, found.checkpoint) == (4, CHECKPOINT)


@pytest.mark.parametrize(("version", "is_of_run"), [(7, False), (5, False), (8, True), (6, True)])
def test_a_node_that_is_ahead_otherwise_is_refused_with_what_to_do(version: int, is_of_run: bool):
    with pytest.raises(VersionOrder, match=r"policy version \d, .*has 4 in .*tasuki down CONFIG") as refused:
        continuation(SAVED, node_version=version, is_of_run=is_of_run)
    assert refused.value.metadata == {"have": str(version), "want": "4"}


def test_without_a_checkpoint_a_node_of_the_run_goes_on():
    found = continuation(earlier(*STEPS[:2]), node_version=2, is_of_run=True)
    assert (found.first_step, found.checkpoint, numbers(found)) == (2, None, [0, 1])


def next_rows(found: Continuation) -> list[object]:
    """Number of the next row, in the order of the data."""
    dataset, order = Dataset(ROWS, seed=0), Dataset(ROWS, seed=0)
    found.seek(dataset)
    (row,) = dataset.next_rows(1)
    return [str(order.next_rows(10).index(row))]


def test_a_checkpoints_place_counts_where_the_node_gets_the_checkpoint():
    saved = earlier(*STEPS, saved=step(3))
    assert next_rows(continuation(saved, node_version=0, is_of_run=False)) == ["8"]
