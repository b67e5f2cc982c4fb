"""Records of a run: its folder, its report, a save on request, and the checkpoints that stay."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tasuki.cli.progress import ProgressDisplay
from tasuki.cli.train import SaveRequest, StepLines, step_line
from tasuki.client.loop_state import LoopState, complete_checkpoints, newest_checkpoint, write_loop_state
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.runs.folder import (
    MetricsFile,
    best_checkpoint,
    changeovers_of,
    read_steps,
    remove_checkpoints,
    summarize,
    write_summary,
)
from tasuki.runs.sft_training import draw_sft_curve, summarize_sft
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.v1.trainer_pb2 import LoadCheckpointRequest
from tasuki.wire.errors import DiskFull, InvalidArgument
from tests.tiny_disk import limited_files
from tests.unit.loop_node import LoopClient, loop_of, train_config

STEPS = [
    Step(0, policy_version=0, num_policy_steps=1, metrics={"loss": 3.0, "num_tokens": 10, "eval/loss": 3.5}),
    Step(1, policy_version=1, num_policy_steps=1),  # its line was lost
    Step(2, policy_version=2, num_skipped_updates=1, grad_norm=float("inf"), metrics={"loss": 2.0, "num_tokens": 12}),
    Step(3, policy_version=2, metrics={"eval/loss": 2.5}),
]


def test_losses_are_the_first_and_the_last_and_an_evaluation_is_no_step() -> None:
    summary = summarize_sft(STEPS, seed=3, seconds=1.25, changeovers=1, policy_version=2)
    assert summary == {
        "eval_loss_before": 3.5, "eval_loss_after": 2.5, "loss_last": 2.0, "seconds": 1.2, "steps": 3, "num_tokens": 22,
        "changeovers": 1, "seed": 3, "policy_version": 2,
    }  # fmt: skip


def test_a_line_has_both_losses() -> None:
    assert [step_line(step) for step in STEPS[::3]] == [
        "step   0  version 0  loss 3.0000  held-out loss 3.5000  0.0 s",
        "step   3  version 2  held-out loss 2.5000  0.0 s",
    ]
    assert "updates skipped" in step_line(STEPS[2])


def test_a_line_leaves_out_what_did_not_take_place() -> None:
    assert step_line(Step(3, policy_version=6, seconds={"evaluate": 0.5})) == ""
    assert step_line(Step(3, policy_version=6, seconds={"evaluate": 0.5}, eval_score=0.25)) == (
        "step   3  version 6  held-out 0.250  0.5 s"
    )
    metrics = {"log_prob_gap_max": 0.00012, "explained_variance": 0.5}
    line = step_line(Step(3, policy_version=6, mean_reward=1.0, metrics=metrics, num_skipped_updates=2, num_failed_rewards=1))
    assert line == (
        "step   3  version 6  reward 1.000  gap 1.2e-04  explained 0.50  1 rewards failed: see samples/  "
        "2 updates skipped, gradients not finite"
        "  0.0 s"
    )


@pytest.fixture
def request_to_save() -> Iterator[SaveRequest]:
    before = signal.getsignal(signal.SIGUSR1)
    request = SaveRequest()
    request.install()
    yield request
    signal.signal(signal.SIGUSR1, before)


def _reporting(request: SaveRequest, steps: list[Step]):
    def report(step: Step) -> None:
        steps.append(step)
        request.end_if_met()
        if step.step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    return report


def test_the_step_after_the_signal_is_saved_and_the_run_ends(tmp_path: Path, request_to_save: SaveRequest) -> None:
    settings = train_config(tmp_path, num_steps=9, prompts_per_step=2, group_size=2, max_new_tokens=4)
    loop, steps = loop_of(LoopClient(), settings), list[Step]()
    loop.save_now = request_to_save.save_now
    with pytest.raises(KeyboardInterrupt):
        loop.run(_reporting(request_to_save, steps))
    assert [step.step for step in steps] == [0, 1, 2]
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found[1].step.step == 2


def test_without_a_signal_nothing_is_saved(tmp_path: Path, request_to_save: SaveRequest) -> None:
    assert not request_to_save.save_now()
    request_to_save.end_if_met()


def test_scores_are_those_of_the_first_and_the_last_evaluation_under_one_name() -> None:
    steps = [Step(step=number, policy_version=number) for number in range(4)]
    steps[0].eval_score, steps[2].eval_score = -3.5, 12.0
    summary = summarize(steps, seed=0, seconds=1.0, changeovers=2, policy_version=3)
    assert (summary["eval_score_before"], summary["eval_score_after"]) == (-3.5, 12.0)
    assert [name for name, value in summary.items() if value in (-3.5, 12.0)] == ["eval_score_before", "eval_score_after"]


def test_lines_of_earlier_lives_are_those_that_are_given_and_later_ones_follow(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path)
    for number in range(4):
        first.report(Step(number, policy_version=number, seconds={"generate": 0.5}))
    assert read_steps(tmp_path) == first.steps
    second = MetricsFile(tmp_path, first.steps[:2])
    second.report(Step(2, policy_version=2, mean_reward=0.25))
    assert read_steps(tmp_path) == second.steps
    assert [step.step for step in second.steps] == [0, 1, 2]


def test_a_last_line_that_was_torn_off_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    metrics = MetricsFile(tmp_path)
    metrics.report(Step(0, policy_version=0))
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 1, "poli')
    assert read_steps(tmp_path) == metrics.steps
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write("\n")
    with pytest.raises(InvalidArgument, match=r"metrics\.jsonl:2 is not a step"):
        read_steps(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe", b"[]", b'{"step": "1"}', b'{"step": 1, "policy_version": "1"}', b'{"step": 1, "num_failed_rewards": null}',
        b'{"step": 1, "seconds": null}', b'{"step": 1, "seconds": {"generate": "1"}}', b'{"step": 1, "eval_score": []}',
        b"[" * 200_000,
    ],
)  # fmt: skip
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidArgument, match=r"metrics\.jsonl:1 is not a step"):
        read_steps(tmp_path)


def test_steps_of_earlier_lives_are_written_also_where_the_file_is_gone(tmp_path: Path) -> None:
    steps = [Step(0, policy_version=0)]
    MetricsFile(tmp_path, steps)
    assert read_steps(tmp_path) == steps


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with limited_files(tmp_path / "disk") as disk:
        metrics = MetricsFile(disk.folder)
        metrics.report(Step(0, policy_version=0))
        disk.fill()
        with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written"):
            metrics.report(Step(1, policy_version=1))
        with pytest.raises(DiskFull, match=r"summary\.json cannot be written"):
            write_summary(disk.folder, {"text": "x" * 10_000})
        disk.free()
        assert read_steps(disk.folder) == metrics.steps[:1]
        assert [path.name for path in disk.folder.iterdir()] == ["metrics.jsonl"]


def test_changeovers_are_counted_by_the_stages_that_end_them() -> None:
    stages = {"LOAD_WEIGHTS": 0.1, "RESUME_KV": 0.1, "DRAIN": 0.1, "LOAD_TRAINER": 0.1}
    silent = {"LOAD_WEIGHTS": 0.1, "RESUME_KV": 0.1}
    assert changeovers_of([Step(0, stage_seconds=stages), Step(1, stage_seconds=silent), Step(2)]) == 3


def test_a_run_that_does_not_learn_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = Progress()
    lines = StepLines(progress, ProgressDisplay(progress, tmp_path))
    stalled = [
        Step(number, policy_version=0, mean_reward=0.0, num_equal_groups=6, metrics={"signal_fraction": 0.0})
        for number in range(6)
    ]
    evaluation = Step(4, policy_version=0, eval_score=0.0)
    for step in [
        stalled[0],
        Step(1, policy_version=0, mean_reward=0.5, num_policy_steps=1),
        *stalled[1:4],
        evaluation,
        *stalled[4:],
    ]:
        lines.report(step)
    out, err = capsys.readouterr()
    assert out.count("signal 0.00  no update: 6 of 6 groups have equal rewards") == 6
    assert err.count("WARNING: 3 steps without an update") == 1
    assert summarize(stalled, seed=0, seconds=1.0, changeovers=0, policy_version=0)["steps_without_update"] == 6


def test_the_time_left_is_told_until_a_score_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = Progress(num_steps=40, eval_every=1)
    lines = StepLines(progress, ProgressDisplay(progress, tmp_path), may_end_early=True)
    lines.report(Step(0, mean_reward=0.5, num_policy_steps=1, seconds={"generate": 30.0}))
    lines.report(Step(1, eval_score=1.0, seconds={"evaluate": 1.0}))
    assert ["  at most 20 min left" in line for line in capsys.readouterr().out.splitlines()] == [True, False]


def test_a_supervised_curve_is_private(tmp_path: Path) -> None:
    draw_sft_curve(tmp_path, [Step(step=0, metrics={"loss": 1.0})])
    assert (tmp_path / "curve.png").stat().st_mode & 0o777 == 0o600


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
