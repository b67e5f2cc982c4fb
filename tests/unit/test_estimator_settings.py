"""Settings of advantages and of the loop that do not fit each other, given in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasuki.config.train_schema import AdvantageConfig
from tests.unit.loop_node import train_config

BATCH = {"estimator": "batch_baseline"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("discount", 0.0),
        ("lam", 1.5),
        ("kl_coef", -1),
        ("kl_coef", True),
        ("kl_target", 0.1),
    ],
)
def test_an_advantage_setting_that_does_not_fit_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        AdvantageConfig.model_validate({"estimator": "leave_one_out", field: value})


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"group_size": 1, "prompts_per_step": 1, "advantages": BATCH}, "group_size"),
        ({"group_size": 1, "advantages": BATCH, "max_batches": 2}, "max_batches"),
        ({"overlong_tokens": 9}, "overlong_tokens"),
        ({"critic_warmup_steps": 2}, "critic_warmup_steps"),
        ({"eval": {"num_samples": 4}}, "num_samples"),
    ],
)
def test_settings_of_a_loop_that_do_not_fit_are_named(tmp_path: Path, own: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        train_config(tmp_path, num_steps=9, **own)
