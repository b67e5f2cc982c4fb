"""The tables of a training run: `[train]` and those below it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, PlainSerializer, PositiveFloat, PositiveInt, model_validator

from tasuki.algorithms.effects import check_effects, check_eval_sampling, check_evaluation
from tasuki.algorithms.estimator import (
    AdvantageSettings,
    Estimator,
    check_critic,
    check_groups,
    check_kl_horizon,
    check_loss,
    check_overlong,
)
from tasuki.algorithms.loss_types import Correction, KlEstimator, LossConfig, OldPolicy, SettingError, ValueLoss
from tasuki.config.algorithms import DEFAULT_MAX_NEW_TOKENS, Algorithm, expanded
from tasuki.config.loss_table import read_loss, write_loss
from tasuki.config.table import Schema, Seed

_MAX_INT32 = 2**31 - 1
"""Of the messages."""
LEAST_TEMPERATURE = 1e-5
"""Below a tenth of it SGLang samples greedily."""


class NamedRewardConfig(Schema):
    function: str
    """As `train.reward.function`."""
    weight: float = 1.0
    """Share in the sum that is learned from; 0 measures without learning."""


class RewardConfig(Schema):
    function: str | None = None
    """"module:function", called with those of prompt, completion, finish_reason, num_tokens and the fields of the dataset line that it
    takes; returns a number."""
    functions: dict[str, NamedRewardConfig] = Field(default={})
    """Several rewards by name, in place of `function`: `[train.reward.functions.NAME]`."""
    num_workers: PositiveInt = 1
    timeout_s: PositiveFloat = 10.0
    """For one sample."""
    on_error: Literal["fail", "zero", "skip"] = "fail"
    """What a reward that raises, hangs or is not finite does: end the run, count as 0, or leave the sample out of baseline and loss."""

    @model_validator(mode="after")
    def _is_one_or_several(self) -> RewardConfig:
        if (self.function is None) is not bool(self.functions):
            raise ValueError("give either function or functions")
        return self


class AdvantageConfig(Schema):
    """From rewards to advantages."""

    estimator: Literal[
        "group_mean", "leave_one_out", "group_baseline_whitened", "globally_whitened", "greedy_baseline", "batch_baseline",
        "running_baseline", "gae",
    ] = "group_mean"  # fmt: skip
    """Where the baseline comes from; "gae" needs `[trainer.critic]`, "batch_baseline" and "running_baseline" are for one completion a
    prompt."""
    std: Literal["none", "sample", "population"] = "sample"
    """Standard deviation that group_mean and batch_baseline divide by."""
    discount: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda."""
    whiten: bool = True
    """Whether GAE's advantages are whitened over the batch."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: PositiveFloat | None = None
    """Nats a sequence to which `kl_coef` is steered; fixed by default."""
    kl_horizon: PositiveFloat = 10_000.0
    """Samples over which an error of 20 % changes `kl_coef` by 20 %."""

    @model_validator(mode="after")
    def _fits(self) -> AdvantageConfig:
        self.settings()
        return self

    def settings(self) -> AdvantageSettings:
        """Raises SettingError naming the key."""
        return AdvantageSettings(
            estimator=Estimator(self.estimator),
            std=self.std,
            discount=self.discount,
            lam=self.lam,
            whiten=self.whiten,
            kl_coef=self.kl_coef,
            kl_estimator=KlEstimator(self.kl_estimator),
            kl_target=self.kl_target,
            kl_horizon=self.kl_horizon,
        )


class EvalConfig(Schema):
    """How held-out prompts are sampled and scored."""

    num_samples: PositiveInt = 1
    """Completions of each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1, le=_MAX_INT32)
    max_new_tokens: PositiveInt | None = None
    """By default `train.max_new_tokens`."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Each k for which pass@k is reported."""
    correct_at: float = 1.0
    """A completion is correct from this reward on."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            problem = f"is {self.temperature:g}; must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}"
            raise SettingError("temperature", problem)
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("num_samples > 1 needs a temperature above 0: greedy samples are equal")
        if any(k > self.num_samples for k in self.pass_at):
            raise ValueError("pass_at is above num_samples")
        check_eval_sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            correct_at=self.correct_at,
            pass_at=self.pass_at,
        )
        return self


class SamplesConfig(Schema):
    """Completions that are written to `output_dir`/samples for people to read."""

    groups_per_step: int = Field(default=4, ge=0)
    """Prompts of each step whose completions are written; 0 writes none."""
    max_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(256_000_000)
    """On disk, for all steps together: bytes, or text such as "1GB". The oldest steps are removed first."""


class ValueLossConfig(Schema):
    """The critic's loss."""

    clip: PositiveFloat | None = None
    """How far a value may move from its old one; unbounded by default."""


LossTable = Annotated[
    LossConfig,
    BeforeValidator(lambda table: read_loss(table) if isinstance(table, dict) else table),
    PlainSerializer(write_loss),
]


class TrainConfig(Schema):
    dataset: Path
    """JSONL; each line an object with `prompt` and any other fields."""
    eval_dataset: Path | None = None
    output_dir: Path
    reward: RewardConfig
    algorithm: Algorithm = "grpo"
    """A name for settings of `[train.advantages]`, `[train.loss]` and others (docs/algorithms.md). What the file sets itself wins."""
    num_steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 32
    group_size: PositiveInt = 8
    """Completions for each prompt."""
    max_new_tokens: PositiveInt = DEFAULT_MAX_NEW_TOKENS
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt of `dataset` and `eval_dataset`; a longer one is refused before anything starts. It tells how much KV a step needs."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Below 1, completions come from a part of the distribution, but log-probs are those of the whole; so with `top_k`."""
    top_k: int | None = Field(default=None, ge=1, le=_MAX_INT32)
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=_MAX_INT32)], ...] = ()
    """Tokens that end a completion, beside the model's own."""
    num_epochs: PositiveInt = 1
    """Passes over the samples of a step."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps of each pass."""
    old_policy: Literal["auto", "current", "given", "rollout"] = "auto"
    """What a loss's ratio is taken against: the policy itself (for one optimizer step), its log-probs computed before the first of several
    steps, or rollout's. "auto" is "given" where a step has several optimizer steps, else "current"."""
    advantages: AdvantageConfig = AdvantageConfig()
    loss: LossTable = LossConfig()
    """Of the policy: `name` ("ppo", "gspo", "cispo", "sapo", "policy_gradient"), its settings and every loss's (docs/algorithms.md)."""
    value_loss: ValueLossConfig = ValueLossConfig()
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the critic alone learns; the policy's schedule begins after them."""
    max_batches: PositiveInt = 1
    """Generations of a step until enough groups differ (DAPO's dynamic sampling); 1 takes the groups as they are. Above 1, groups whose
    rewards agree are left out, also of KL divergence and entropy."""
    mask_truncated: bool = False
    """Whether completions that reached `max_new_tokens` are left out of the loss."""
    overlong_tokens: PositiveInt | None = None
    """Last tokens before `max_new_tokens` over which the reward falls by up to 1 (DAPO)."""
    keep_optimizer: bool = False
    """Whether a run on a living node goes on with its optimizer state. The schedule begins at step 0 either way."""
    eval: EvalConfig = EvalConfig()
    eval_every: PositiveInt | None = None
    """Steps between evaluations; the first and the last always take place when there is an eval_dataset."""
    stop_at_eval_score: float | None = None
    """End the run early once the held-out score reaches this."""
    samples: SamplesConfig = SamplesConfig()
    save_every: PositiveInt | None = None
    """Steps between checkpoints, from which `tasuki train --resume` goes on; none by default."""
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, table: Any) -> Any:
        return expanded(table) if isinstance(table, dict) else table

    @model_validator(mode="after")
    def _fits_the_loop(self) -> TrainConfig:
        estimator = Estimator(self.advantages.estimator)
        check_groups(estimator, group_size=self.group_size, num_groups=self.prompts_per_step, max_batches=self.max_batches)
        check_overlong(self.overlong_tokens, max_new_tokens=self.max_new_tokens)
        self._check_effects()
        check_loss(self.policy_loss(), num_updates=self.num_epochs * self.num_mini_batches)
        check_critic(estimator, value_loss=self.critic_loss(), warmup_steps=self.critic_warmup_steps)
        if self.critic_warmup_steps >= self.num_steps:
            problem = (
                f"is {self.critic_warmup_steps} of num_steps = {self.num_steps}, so the policy would never learn; lower it"
            )
            raise SettingError("critic_warmup_steps", problem)
        check_kl_horizon(self.advantages.settings(), prompts_per_step=self.prompts_per_step, group_size=self.group_size)
        return self

    def _check_effects(self) -> None:
        has_critic, has_ratio = self.advantages.estimator == "gae", self.loss.has_ratio
        critic, ratio = 'it is of the critic; use advantages.estimator = "gae"', "the loss has no ratio; use another loss.name"
        check_effects(
            (
                ("value_loss.clip", self.value_loss.clip, None, has_critic, critic),
                ("old_policy", self.old_policy, "auto", has_ratio, ratio),
            )
        )
        check_evaluation(
            has_prompts=self.eval_dataset is not None,
            needed="nothing is held out; give an eval_dataset",
            eval_every=self.eval_every,
            stop_at_eval_score=self.stop_at_eval_score,
            evaluation=self.eval != EvalConfig(),
        )

    def policy_loss(self) -> LossConfig:
        """The loss with its old policy. "auto" recomputes log-probs only where a step has several optimizer steps, and the loss a ratio."""
        if not self.loss.has_ratio:
            return self.loss
        if self.old_policy != "auto":
            return replace(self.loss, old_policy=OldPolicy(self.old_policy))
        has_several = self.num_epochs * self.num_mini_batches > 1
        return replace(self.loss, old_policy=OldPolicy.GIVEN if has_several else OldPolicy.CURRENT)

    def critic_loss(self) -> LossConfig | None:
        """None without a critic. Aggregated as the policy's loss, so that both count the same tokens."""
        if self.advantages.estimator != "gae":
            return None
        return LossConfig(
            loss=ValueLoss(clip=self.value_loss.clip),
            aggregation=self.loss.aggregation,
            aggregation_length=self.loss.aggregation_length,
            correction=Correction(token_truncation=None),
        )
