"""Which checkpoints of a run stay on disk."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasuki.client.loop_state import LoopState, complete_checkpoints, write_loop_state
from tasuki.client.step import Step
from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.runs.folder import best_checkpoint, remove_checkpoints
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.v1.trainer_pb2 import LoadCheckpointRequest


def run_of(folder: Path, scores: Sequence[float | None], *, is_sft: bool = False) -> list[Step]:
    """A run whose step N saved version N + 1; scores: evaluations of versions 0, 1, ..."""
    steps = [Step(number, number, num_policy_steps=1) for number in range(len(scores))]
    for step, score in zip(steps, scores, strict=True):
        if score is not None:
            step.eval_score, step.metrics = (None, {"eval/loss": score}) if is_sft else (score, {})
        path = folder / "checkpoints" / f"version-{step.next_version():06d}"
        path.mkdir(parents=True)
        write_loop_state(path, LoopState(step, {}))
    return steps


def left(folder: Path) -> list[int]:
    """Versions of the complete checkpoints; nothing else may be there."""
    paths = complete_checkpoints(folder / "checkpoints")
    assert len(list((folder / "checkpoints").iterdir())) == len(paths)
    return [int(path.name.removeprefix("version-")) for path in paths]


@pytest.mark.parametrize(
    ("scores", "is_sft", "best", "kept"),
    [
        ([0.9, 0.1, 0.7, None, 0.3, 0.2], False, 2, [2, 5, 6]),
        ([0.9, 0.1, 0.7, 0.7, 0.3, 0.2], False, 3, [3, 5, 6]),  # the newer of equals
        ([9.0, 0.1, 0.7, None, 0.3, 0.2], True, 1, [1, 5, 6]),  # a loss
        ([0.9, 0.1, 0.2, None, 0.3, 0.5], False, 5, [5, 6]),
        ([None] * 6, False, None, [5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, scores: list[float | None], is_sft: bool, best: int | None, kept: list[int]
) -> None:
    steps = run_of(tmp_path, scores, is_sft=is_sft)
    remove_checkpoints(tmp_path, steps, keep_last=2, log=tmp_path / "none")
    assert left(tmp_path) == kept
    found = best_checkpoint(tmp_path, steps)
    assert (None if found is None else found[1].policy_version) == best


def test_the_checkpoint_that_the_trainers_log_builds_on_is_kept(tmp_path: Path) -> None:
    steps, log = run_of(tmp_path, [None] * 5), TrainingLog(tmp_path / "training.log", failpoints=NO_FAILPOINTS)
    path = tmp_path / "checkpoints" / "version-000002"
    asyncio.run(log.saved(TrainingRecord(checkpoint=LoadCheckpointRequest(path=str(path)))))
    log.close()
    remove_checkpoints(tmp_path, steps, keep_last=1, log=tmp_path / "training.log")
    assert left(tmp_path) == [2, 5]


def test_a_removal_that_was_cut_off_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run_of(tmp_path, [None] * 4)

    def cut_off(path: Path) -> None:
        raise PermissionError(13, "denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        remove_checkpoints(tmp_path, steps, keep_last=2, log=tmp_path / "none")
    assert "cannot be removed" in capsys.readouterr().err
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["version-000003", "version-000004"]
    remove_checkpoints(tmp_path, steps, keep_last=2, log=tmp_path / "none")
    assert left(tmp_path) == [3, 4]
