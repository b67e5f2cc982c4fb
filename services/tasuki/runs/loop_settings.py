"""Settings and rewards of the training loop from a [train] table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasuki.client.evaluation import EvalSettings
from tasuki.client.rewards import NamedReward, RewardPool
from tasuki.client.rl_loop import Settings
from tasuki.client.types import SamplingParams
from tasuki.config.train_schema import RewardConfig, TrainConfig
from tasuki.runs.keys import field_as_key


def loop_settings(train: TrainConfig) -> Settings:
    return Settings(
        num_steps=train.num_steps,
        prompts_per_step=train.prompts_per_step,
        group_size=train.group_size,
        sampling=SamplingParams(
            max_new_tokens=train.max_new_tokens,
            temperature=train.temperature,
            top_p=train.top_p,
            top_k=train.top_k,
            stop_token_ids=train.stop_token_ids,
        ),
        output_dir=train.output_dir,
        loss=train.policy_loss(),
        value_loss=train.critic_loss(),
        critic_warmup_steps=train.critic_warmup_steps,
        advantages=train.advantages.settings(),
        num_epochs=train.num_epochs,
        num_mini_batches=train.num_mini_batches,
        max_batches=train.max_batches,
        mask_truncated=train.mask_truncated,
        overlong_tokens=train.overlong_tokens,
        evaluation=EvalSettings(**train.eval.model_dump()),
        eval_every=train.eval_every,
        stop_at_eval_score=train.stop_at_eval_score,
        save_every=train.save_every,
        seed=train.seed,
    )


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
