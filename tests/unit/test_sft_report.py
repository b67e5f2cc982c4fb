"""Figures of a supervised run, and the lines it prints."""

from __future__ import annotations

from tasuki.cli.train import step_line
from tasuki.client.step import Step
from tasuki.runs.sft_training import summarize_sft

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
