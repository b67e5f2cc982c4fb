"""Lines that `tasuki train` prints for its steps."""

from __future__ import annotations

from tasuki.cli.train import step_line
from tasuki.client.step import Step


def test_a_line_leaves_out_what_did_not_take_place() -> None:
    assert step_line(Step(3, policy_version=6, seconds={"evaluate": 0.5})) == ""
    assert step_line(Step(3, policy_version=6, seconds={"evaluate": 0.5}, eval_score=0.25)) == (
        "step   3  version 6  held-out 0.250  0.5 s"
    )
    metrics = {"log_prob_gap_max": 0.00012, "explained_variance": 0.5}
    line = step_line(Step(3, policy_version=6, mean_reward=1.0, metrics=metrics, num_skipped_updates=2, num_failed_rewards=1))
    assert line == (
        "step   3  version 6  reward 1.000  gap 1.2e-04  explained 0.50  1 rewards failed  2 updates skipped, gradients not finite"
        "  0.0 s"
    )
