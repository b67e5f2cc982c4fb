"""The tables of a run: `[train]` with its presets by algorithm, and `[sft]`."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, model_validator

from tasuki.algorithms.loss_types import COMMON, Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.setting import KL_HORIZON, LEAST_TEMPERATURE, MAX_KL_ERROR, Estimator, SettingError, Std
from tasuki.config.table import Bool, Float, Int, PositiveFloat, PositiveInt, Schema

_MAX_INT32 = 2**31 - 1
Algorithm = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo", "dapo", "gspo", "cispo"]
DEFAULT_MAX_NEW_TOKENS = 512
LOSS_KEYS = tuple(name for name in COMMON if name not in ("old_policy", "denominator", "aggregation_length"))
"""Keys of every loss. `old_policy` is a key of [train], `aggregation_length` its `max_new_tokens`; `denominator` is for loops that
accumulate several calls."""
PRESETS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("algorithms.toml").read_text())


def expanded(train: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the algorithm's preset under a [train] table, except for settings that another loss or estimator lacks."""
    preset = dict(PRESETS.get(str(train.get("algorithm", "grpo")), {}))
    own, usual = train.get("loss"), preset.get("loss", {})
    if isinstance(own, Mapping) and own.get("name", usual.get("name")) != usual.get("name"):
        preset["loss"] = {key: value for key, value in usual.items() if key in LOSS_KEYS}
    merged = _merged(_with_effect(preset, train), train)
    loss = merged.get("loss")
    if isinstance(loss, Mapping) and loss.get("aggregation") == "constant":
        # Dr. GRPO's constant: the maximum completion length.
        merged["loss"] = {"aggregation_length": merged.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS), **loss}
    return merged


def _with_effect(preset: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """The preset without settings that apply only to its own estimator."""
    own, usual = train.get("advantages"), preset.get("advantages", {})
    estimator = own.get("estimator", usual.get("estimator")) if isinstance(own, Mapping) else usual.get("estimator")
    if estimator == usual.get("estimator"):
        return dict(preset)
    kept = {key: value for key, value in usual.items() if key != "std" or estimator in ("group_mean", "batch_baseline")}
    return {**{key: value for key, value in preset.items() if key != "value_loss" or estimator == "gae"}, "advantages": kept}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


class RewardConfig(Schema):
    function: str | dict[str, str]
    """"module:function", or several by name: `{ exact = "rewards:exact", form = "rewards:form" }`. It is called by keyword with those of
    prompt, completion, finish_reason, num_tokens and the dataset line's fields that its signature takes, and returns a number. One that
    takes `completions` scores a group, or with `prompts` the batch, and returns a list (docs/guides/rewards.md)."""
    weights: dict[str, Float] = Field(default={})
    """Weight of each named function in their sum, 1 by default; 0 reports it without training on it."""
    num_workers: PositiveInt = 1
    """Processes that compute rewards at the same time."""
    timeout_s: PositiveFloat = 10.0
    """Time limit of each call: for a completion, a group or the batch."""
    on_error: Literal["fail", "zero", "skip"] = "fail"
    """Action if a reward raises, times out or is no number up to 1e15: end the run, count 0, or skip the sample in baseline and loss."""

    @model_validator(mode="after")
    def _weights_have_functions(self) -> "RewardConfig":
        names = () if isinstance(self.function, str) else self.function
        if not self.function:
            raise SettingError("function", "names no function")
        for name in self.weights:
            if name not in names:
                raise SettingError("weights", f"has {name}, which names no function")
        return self


class EpisodeConfig(Schema):
    """Episodes of several turns, run by a function, a program or a server instead of one completion scored by `[train.reward]`."""

    function: str | None = None
    """"module:function": `async def`, called by keyword with `policy` and those of the dataset line's fields that its signature takes.
    It returns the reward."""
    command: tuple[str, ...] = ()
    """Program and arguments instead, run in this file's folder for each episode. It gets the dataset line as JSON on standard input and
    the policy at `OPENAI_BASE_URL`. Its last line of output is the reward."""
    server: str | None = None
    """Address instead, to which each episode posts the dataset line, with the policy's addresses as `policy`, and which answers
    `{"reward": 1.0}`."""
    num_workers: PositiveInt = 1
    """Processes, each of which runs many episodes at once."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of an episode, without the time that the policy takes."""
    max_turns: PositiveInt = 16
    max_tokens: PositiveInt | None = None
    """Maximum tokens of an episode, prompts included; by default what the context and a micro-batch hold."""
    discount: Float = Field(default=1.0, gt=0, le=1)
    """Factor by which the reward of each further turn counts less, where the function calls `policy.reward`."""
    on_error: Literal["fail", "zero", "skip"] = "fail"
    """Action if the function raises or exceeds its limit: end the run, count 0, or skip the episode in baseline and loss."""

    @model_validator(mode="after")
    def _is_one(self) -> "EpisodeConfig":
        if self.server and not re.fullmatch(r"http://[^/?#@]+(/[^?#]*)?", self.server):
            raise SettingError("server", f"is {self.server}; give http://HOST:PORT/PATH, without TLS, user and query")
        num_given = sum(map(bool, (self.function, self.command, self.server)))
        if num_given != 1:
            raise SettingError(
                "function", "and command and server exclude each other" if num_given else "is missing, or command or server"
            )
        return self


class AdvantageConfig(Schema):
    """Advantages from rewards."""

    estimator: Estimator = Estimator.GROUP_MEAN
    """Baseline of the advantages. "gae" needs `[trainer.critic]`; "batch_baseline" and "running_baseline" are for one completion per
    prompt."""
    std: Std = "sample"
    """Standard deviation by which group_mean and batch_baseline divide."""
    discount: Float = Field(default=1.0, gt=0, le=1)
    """Factor by which a later reward counts less, a token."""
    lam: Float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda."""
    whiten: Bool = True
    """Whether to whiten GAE's advantages over the batch."""
    kl_coef: Float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference, estimated by k1, within the reward."""
    kl_target: PositiveFloat | None = None
    """Target KL divergence in nats per sequence, towards which `kl_coef` adapts; by default `kl_coef` is fixed."""

    @model_validator(mode="after")
    def _fits(self) -> "AdvantageConfig":
        if self.kl_target is not None and not self.kl_coef:
            raise SettingError("kl_target", "needs a kl_coef above 0 to start from")
        return self


class EvalConfig(Schema):
    """Sampling and scoring of held-out prompts."""

    num_samples: PositiveInt = 1
    """Completions per prompt."""
    temperature: Float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: Float | None = Field(default=None, gt=0, le=1)
    """Share of the distribution to sample from; all by default."""
    max_new_tokens: PositiveInt | None = None
    """Defaults to `train.max_new_tokens`."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for which pass@k is reported. A completion with a reward of 1 or more is correct."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvalConfig":
        if 0 < self.temperature < LEAST_TEMPERATURE:
            problem = f"is {self.temperature:g}; must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}"
            raise SettingError("temperature", problem)
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("num_samples > 1 needs a temperature above 0: greedy samples are equal")
        if any(k > self.num_samples for k in self.pass_at):
            raise ValueError("pass_at is above num_samples")
        return self


class SamplesConfig(Schema):
    """Completions written to `output_dir`/samples and `output_dir`/evaluations for inspection."""

    groups_per_step: Int = Field(default=4, ge=0)
    """Prompts per step whose completions are written with tokens and log-probs; 0 writes nothing. Of the other prompts the first 32 are
    written as text, and all rewards. Beyond 256 MB on disk the oldest steps are deleted."""


def _read_loss(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return table
    settings = dict(table)
    return LossConfig.read(settings.pop("name", "ppo"), settings, common=(*LOSS_KEYS, "aggregation_length"))


_OF_TRAIN = ("old_policy", "aggregation_length")


def write_loss(loss: LossConfig) -> dict[str, Any]:
    """The loss as `[train.loss]`: `name`, its own settings and the common ones, side by side."""
    return {"name": loss.name, **{key: value for key, value in loss.settings().items() if key not in _OF_TRAIN}}


def _read_value_loss(table: Any) -> Any:
    return LossConfig.read("value", table, common=()).loss if isinstance(table, Mapping) else table


class TrainConfig(Schema):
    dataset: Path
    """File whose rows have `prompt` and any other fields: an object a line (JSONL), or .csv, .json or .parquet. Or a dataset of the
    Hugging Face hub, "org/name@revision:config:split", whose split is "train" by default; needs the extra `hub`."""
    eval_dataset: Path | None = None
    """Held-out rows, given likewise."""
    columns: dict[str, str] = Field(default={})
    """Column of each field in both datasets, such as `{ prompt = "question", answer = "answer" }`. Others are left out. By default every
    column is the field of its name."""
    output_dir: Path
    """New folder for everything that the run writes; with --resume the run's own."""
    reward: RewardConfig | None = None
    """Scores single completions; either it or `episode`."""
    episode: EpisodeConfig | None = None
    """Runs episodes of several turns."""
    algorithm: Algorithm = "grpo"
    """Named defaults for `[train.advantages]`, `[train.loss]`, ... (docs/reference/algorithms.md). Explicit settings take precedence."""
    num_steps: PositiveInt = 100
    """Steps of the run: each generates, scores and trains on one batch."""
    prompts_per_step: PositiveInt = 32
    """Prompts whose completions make a step's batch."""
    group_size: PositiveInt = 8
    """Completions per prompt."""
    oversample: Float = Field(default=1.0, ge=1, le=4)
    """Groups that generate at once, as a multiple of `prompts_per_step`. Above 1, a step takes the first complete groups; the others are
    cut at the changeover and continue after it, so no step waits for the longest completion. Needs `max_staleness`."""
    max_staleness: Int = Field(default=0, ge=0)
    """Policy versions by which a token may be older than the weights that train on it, with `oversample` above 1. A group beyond it is
    dropped, and its prompt generated again."""
    max_new_tokens: PositiveInt = DEFAULT_MAX_NEW_TOKENS
    """Length at which a completion is cut, in tokens."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum prompt length in `dataset` and `eval_dataset`. Longer prompts are refused at start. Bounds the KV cache that a step needs."""
    temperature: Float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Of the sampling and of the log-probs."""
    top_p: Float | None = Field(default=None, gt=0, le=1)
    """Below 1, completions come from a truncated distribution, while log-probs are of the full one; likewise for `top_k`."""
    top_k: Int | None = Field(default=None, ge=1, le=_MAX_INT32)
    """Number of most likely tokens to sample from; all by default."""
    stop_token_ids: tuple[Annotated[Int, Field(ge=0, le=_MAX_INT32)], ...] = ()
    """Stop tokens in addition to the model's own."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(default=(), max_length=16)
    """Texts that end a completion, also in evaluations, such as `["</answer>"]`. The tokens that form the text are drawn and trained."""
    num_epochs: PositiveInt = 1
    """Passes over the samples of a step."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per pass."""
    old_policy: Literal["auto", "current", "given", "rollout"] = "auto"
    """Denominator policy of the loss's ratio: "current" is the policy itself (for one optimizer step), "given" its log-probs computed
    before the first of several steps, "rollout" rollout's. "auto" is "given" if a step has several optimizer steps, else "current"."""
    advantages: AdvantageConfig = AdvantageConfig()
    loss: Annotated[InstanceOf[LossConfig], BeforeValidator(_read_loss), PlainSerializer(write_loss)] = LossConfig()
    """Loss of the policy: `name`, its own settings and the common ones (docs/reference/algorithms.md)."""
    value_loss: Annotated[
        InstanceOf[ValueLoss],
        BeforeValidator(_read_value_loss),
        PlainSerializer(lambda loss: {} if loss.clip is None else {"clip": loss.clip}),
    ] = ValueLoss()
    """Loss of the critic."""
    critic_warmup_steps: Int = Field(default=0, ge=0)
    """Initial steps in which only the critic learns. The policy's schedule starts after them."""
    max_batches: PositiveInt = 1
    """Maximum generations per step until enough groups differ (DAPO's dynamic sampling); 1 keeps all groups. Above 1, groups with equal
    rewards are discarded, also for the KL divergence and the entropy."""
    mask_truncated: Bool = False
    """Whether completions that reached `max_new_tokens` are excluded from the loss."""
    overlong_tokens: PositiveInt | None = None
    """Length in tokens of the zone before `max_new_tokens` over which the reward falls by up to 1 (DAPO)."""
    eval: EvalConfig = EvalConfig()
    eval_every: PositiveInt | None = None
    """Steps between evaluations. With an eval_dataset, the first and last steps are always evaluated."""
    stop_at_eval_score: Float | None = None
    """Ends the run early once the held-out score reaches this value."""
    samples: SamplesConfig = SamplesConfig()
    save_every: PositiveInt | None = None
    """Steps between checkpoints for `tasuki train --resume`; none by default."""
    keep_last: PositiveInt = 3
    """Newest checkpoints that are kept, besides the one with the best evaluation; a second one is there if the newest is damaged."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, table: Any) -> Any:
        return expanded(table) if isinstance(table, dict) else table

    @model_validator(mode="after")
    def _fits_the_loop(self) -> "TrainConfig":
        for field, problem in (*self._problems(), *self._problems_of_carrying()):
            raise SettingError(field, problem)
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Settings under which a step would have no gradient, or one could take kl_coef to 0 or below, each with its problem."""
        estimator, loss = self.advantages.estimator, self.policy_loss()
        if (self.reward is None) == (self.episode is None):
            yield "reward", "or train.episode is missing" if self.reward is None else "and train.episode exclude each other"
        if self.episode is not None and estimator is Estimator.GREEDY_BASELINE:
            yield "advantages.estimator", '"greedy_baseline" is for single completions, not for train.episode'
        if self.episode is not None and self.overlong_tokens is not None:
            yield "overlong_tokens", "is for single completions, not for train.episode"
        if self.group_size == 1 and self.prompts_per_step == 1 and estimator is Estimator.BATCH_BASELINE:
            yield "group_size", 'of 1 with one prompt a step teaches nothing with advantages.estimator = "batch_baseline"'
        if self.group_size == 1 and estimator.needs_groups:
            others = ", ".join(f'"{other}"' for other in Estimator if not other.needs_groups)
            yield "group_size", f'of 1 teaches nothing with advantages.estimator = "{estimator}"; use one of {others}'
        if self.group_size == 1 and self.max_batches > 1:
            yield "max_batches", "above 1 keeps groups that differ, which a group of one never does"
        num_samples = self.prompts_per_step * self.group_size
        if self.advantages.kl_target is not None and MAX_KL_ERROR * num_samples >= KL_HORIZON:
            problem = f"is for steps of fewer than {KL_HORIZON / MAX_KL_ERROR:g} samples, and there are {num_samples}"
            yield "advantages.kl_target", problem
        if not loss.has_advantages:
            yield "loss", f"{loss.name} does not learn from rewards"
        if self.num_updates > 1 and loss.has_ratio and loss.old_policy is OldPolicy.CURRENT:
            problem = f'"current" is for one optimizer step a step, and there are {self.num_updates}; use "given"'
            yield "old_policy", problem
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            yield "overlong_tokens", f"is {self.overlong_tokens}; must be from 1 to max_new_tokens = {self.max_new_tokens}"
        if self.critic_warmup_steps and estimator is not Estimator.GAE:
            yield "critic_warmup_steps", 'needs a critic: use advantages.estimator = "gae"'
        if self.critic_warmup_steps >= self.num_steps:
            problem = f"is {self.critic_warmup_steps} of num_steps = {self.num_steps}"
            yield "critic_warmup_steps", f"{problem}, so the policy would never train; lower it"

    def _problems_of_carrying(self) -> Iterator[tuple[str, str]]:
        """What cannot be carried over a changeover, and bounds that would drop every carried group."""
        loss, key = self.policy_loss(), "oversample"
        if self.oversample == 1:
            return
        if self.max_staleness < self.num_updates:
            problem = f"is {self.max_staleness}; with oversample above 1 it must be at least the {self.num_updates} versions of a step"
            yield "max_staleness", problem
        if self.max_batches > 1:
            yield key, "above 1 and max_batches above 1 exclude each other"
        if self.advantages.estimator is Estimator.GREEDY_BASELINE:
            yield key, 'above 1 does not go with advantages.estimator = "greedy_baseline"'
        if not loss.truncates and not loss.correction.masks and loss.old_policy is not OldPolicy.ROLLOUT:
            problem = 'above 1 trains on tokens of earlier versions: set a correction in train.loss, or old_policy = "rollout"'
            yield key, problem

    @property
    def num_running_groups(self) -> int:
        """Groups that generate at once."""
        return math.ceil(self.oversample * self.prompts_per_step)

    @property
    def num_updates(self) -> int:
        """Optimizer steps on the samples of a step."""
        return self.num_epochs * self.num_mini_batches

    def policy_loss(self) -> LossConfig:
        """The loss with its old policy. "auto" becomes "given" only if a step has several optimizer steps and the loss has a ratio."""
        if not self.loss.has_ratio:
            return self.loss
        if self.old_policy != "auto":
            return replace(self.loss, old_policy=OldPolicy(self.old_policy))
        return replace(self.loss, old_policy=OldPolicy.GIVEN if self.num_updates > 1 else OldPolicy.CURRENT)

    def critic_loss(self) -> LossConfig | None:
        """The critic's loss, or None without a critic. Aggregated like the policy's, so that both count the same tokens."""
        if self.advantages.estimator is not Estimator.GAE:
            return None
        return LossConfig(
            loss=self.value_loss,
            aggregation=self.loss.aggregation,
            aggregation_length=self.loss.aggregation_length,
            correction=Correction(token_truncation=None),
        )


class SftConfig(Schema):
    """Supervised fine-tuning with `tasuki train`, instead of `[train]`."""

    dataset: Path
    """Rows with `messages`, a chat, or with `prompt` and `completion`; a file or a dataset of the hub, as `train.dataset`."""
    eval_dataset: Path | None = None
    """Held-out rows in the same format."""
    columns: dict[str, str] = Field(default={})
    """As `train.columns`."""
    output_dir: Path
    """New folder for everything that the run writes; with --resume the run's own."""
    num_steps: PositiveInt | None = None
    """Number of optimizer steps; by default that of `num_epochs`."""
    num_epochs: PositiveInt | None = None
    """Passes over the dataset, instead of `num_steps`; default 1."""
    samples_per_step: PositiveInt = 32
    """Lines in a step's batch."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of a line, prompt plus completion; longer lines are refused. Defaults to its upper bound, the smaller of the model's
    context length and `trainer.micro_batch_tokens`."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How token losses are reduced to one number (docs/reference/algorithms.md)."""
    eval_every: PositiveInt | None = None
    """Steps between held-out losses. With an eval_dataset, they are always computed for the first and last steps."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints for `tasuki train --resume`; none by default."""
    keep_last: PositiveInt = 3
    """Newest checkpoints that are kept, besides the one with the best evaluation; a second one is there if the newest is damaged."""

    @model_validator(mode="after")
    def _fits_the_loop(self) -> "SftConfig":
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError("give num_steps or num_epochs, not both")
        return self
