"""The figures of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.client.step import Step
from tasuki.runs.folder import MetricsFile, changeovers_of, read_steps, summarize, write_summary
from tasuki.wire.errors import DiskFull, InvalidArgument
from tests.tiny_disk import limited_files


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
