"""Rewards of the training loop from a [train] table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasuki.client.rewards import NamedReward, RewardPool
from tasuki.config.train_schema import RewardConfig
from tasuki.runs.keys import field_as_key


def open_rewards(reward: RewardConfig, folders: Sequence[Path], *, num_workers: int) -> RewardPool:
    """Starts the workers of `[train.reward]`, which import its functions. Raises InvalidArgument naming the key."""
    key = "train.reward.functions" if reward.function is None else "train.reward.function"
    with field_as_key("reward", "train.reward"), field_as_key("reward.function", key):
        return RewardPool(
            named_rewards(reward),
            folders=folders,
            num_workers=num_workers,
            timeout_s=reward.timeout_s,
            on_error=reward.on_error,
        )


def named_rewards(reward: RewardConfig) -> str | list[NamedReward]:
    """The `function` argument of RewardPool."""
    if reward.function is not None:
        return reward.function
    return [NamedReward(name, each.function, each.weight) for name, each in reward.functions.items()]
