"""The figures of a training run."""

from __future__ import annotations

from tasuki.cli.run_folder import summarize
from tasuki.client.step import Step


def test_scores_are_those_of_the_first_and_the_last_evaluation_under_one_name() -> None:
    steps = [Step(step=number, policy_version=number) for number in range(4)]
    steps[0].eval_score, steps[2].eval_score = -3.5, 12.0
    summary = summarize(steps, seed=0, seconds=1.0, changeovers=2, policy_version=3)
    assert (summary["eval_score_before"], summary["eval_score_after"]) == (-3.5, 12.0)
    assert [name for name, value in summary.items() if value in (-3.5, 12.0)] == ["eval_score_before", "eval_score_after"]
