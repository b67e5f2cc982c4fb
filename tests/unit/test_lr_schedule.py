"""The learning rate of every step."""

from typing import Literal

import pytest

from tasuki.config.trainer_schema import OptimizerConfig
from tasuki.trainer.learner import scheduled_rate


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "num_steps", "rates"),
    [
        ("constant", 3, None, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        ("linear", 0, 4, {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0, 5: 0.0}),
        ("linear", 5, 5, {5: 1.0, 6: 0.0}),  # a warm-up as long as the schedule
        ("cosine", 2, 6, {1: 2 / 3, 2: 1.0, 4: 0.5, 6: 0.0, 9: 0.0}),
    ],
)
def test_rates_rise_to_the_peak_and_fall_to_zero(
    schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int | None, rates: dict[int, float]
) -> None:
    config = OptimizerConfig(learning_rate=1.0, lr_schedule=schedule, warmup_steps=warmup_steps)
    assert {step: scheduled_rate(config, step, num_steps=num_steps) for step in rates} == pytest.approx(rates)
