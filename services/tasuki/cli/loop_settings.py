"""What a [train] table says to the training loop."""

from __future__ import annotations

from dataclasses import replace

from tasuki.algorithms.loss_types import Correction, KlEstimator, LossConfig, OldPolicy, ValueLoss
from tasuki.client.estimation import AdvantageSettings, Estimator
from tasuki.client.evaluation import EvalSettings
from tasuki.client.rewards import NamedReward
from tasuki.client.rl_loop import Settings
from tasuki.client.types import SamplingParams
from tasuki.config.train_schema import AdvantageConfig, RewardConfig, TrainConfig


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
        loss=replace(train.loss, old_policy=old_policy(train)),
        value_loss=_value_loss(train) if train.advantages.estimator == "gae" else None,
        critic_warmup_steps=train.critic_warmup_steps,
        advantages=_advantages(train.advantages),
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


def old_policy(train: TrainConfig) -> OldPolicy:
    """ "auto" recomputes log-probs only where a step has several optimizer steps, and the loss a ratio."""
    if not train.loss.has_ratio:
        return OldPolicy.CURRENT
    if train.old_policy != "auto":
        return OldPolicy(train.old_policy)
    return OldPolicy.GIVEN if train.num_epochs * train.num_mini_batches > 1 else OldPolicy.CURRENT


def named_rewards(reward: RewardConfig) -> str | list[NamedReward]:
    """What RewardPool takes."""
    if reward.function is not None:
        return reward.function
    return [NamedReward(name, each.function, each.weight) for name, each in reward.functions.items()]


def _value_loss(train: TrainConfig) -> LossConfig:
    # Aggregated as the policy's loss, so that both count the same tokens.
    return LossConfig(
        loss=ValueLoss(clip=train.value_loss.clip),
        aggregation=train.loss.aggregation,
        aggregation_length=train.loss.aggregation_length,
        correction=Correction(token_truncation=None),
    )


def _advantages(config: AdvantageConfig) -> AdvantageSettings:
    return AdvantageSettings(
        estimator=Estimator(config.estimator),
        std=config.std,
        discount=config.discount,
        lam=config.lam,
        whiten=config.whiten,
        kl_coef=config.kl_coef,
        kl_estimator=KlEstimator(config.kl_estimator),
        kl_target=config.kl_target,
        kl_horizon=config.kl_horizon,
    )
