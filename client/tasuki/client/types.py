"""Arguments and results of the client's verbs: plain values, with numpy arrays for per-token fields. T is the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.wire.stages import Phase, Stage, StageStatus, WireEnum


class FinishReason(WireEnum):
    """Why a completion ended."""

    STOP = "STOP"
    """An end-of-sequence or stop token was sampled; it is the last token."""
    LENGTH = "LENGTH"
    CUT = "CUT"
    """Stopped by a drain. The tokens generated so far are valid for the sample's policy version."""


class Role(WireEnum):
    """A network that the trainer holds."""

    POLICY = "POLICY"
    REFERENCE = "REFERENCE"
    """The frozen weights that training started from."""
    CRITIC = "CRITIC"
    """Estimates the value of each token. Only on nodes with a table [trainer.critic]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in SGLang. None leaves SGLang's default."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    """In addition to the model's own; see RolloutState."""
    ignore_eos: bool | None = None
    """Ignores every stop token, including those in stop_token_ids."""
    sampling_seed: int | None = None
    """Base seed: each sample's seed is derived from it, the prompt's position and sample_index. Reproducible on a CPU only."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion from rollout."""

    prompt_index: int
    sample_index: int
    token_ids: NDArray[np.int32]
    """[T], completion only."""
    rollout_log_probs: NDArray[np.float32]
    """[T], natural logarithms, computed with `temperature` and penalties, before top_p, top_k and min_p filter the distribution."""
    finish_reason: FinishReason
    policy_version: int
    temperature: float = 1.0
    """Temperature behind rollout_log_probs; 1 for greedy samples."""
    has_exact_log_probs: bool = True
    """Whether every token was drawn from softmax(logits / temperature). False for greedy samples and where top_p, top_k, min_p,
    min_new_tokens or a penalty changed the distribution. Importance ratios from these log-probs are then biased."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One sequence to train on or score. Per-token fields have one entry for each completion token, T in all, or are empty."""

    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    completion_token_ids: Sequence[int] | NDArray[np.int32]
    """[T], at least one."""
    rollout_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Required by every policy loss except SftLoss."""
    advantages: float | Sequence[float] | NDArray[np.float32] = ()
    """[T], or one number for the whole completion. Required by every policy loss except SftLoss."""
    ref_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Required when kl_coef is not 0."""
    loss_mask: Sequence[float] | NDArray[np.float32] = ()
    """Zeros and ones; empty counts every token."""
    policy_version: int = 0
    """Version of the weights that generated the sample."""
    temperature: float | None = None
    """Sampling temperature; None means 1. `TrainingSample.of` copies it from the sample."""
    old_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """From the policy before the first of several steps on the batch. Required with OldPolicy.GIVEN."""
    values: Sequence[float] | NDArray[np.float32] = ()
    """From the critic before the first step on the batch. Required by a clipped ValueLoss."""
    returns: Sequence[float] | NDArray[np.float32] = ()
    """Targets of the critic. Required by ValueLoss."""

    @classmethod
    def of(
        cls,
        sample: Sample,
        *,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        advantages: float | Sequence[float] | NDArray[np.float32] = (),
        loss_mask: Sequence[float] | NDArray[np.float32] = (),
    ) -> TrainingSample:
        """Builds a training sample from a rollout sample: copies its tokens, log-probs, temperature and policy version."""
        return cls(
            prompt_token_ids=prompt_token_ids,
            completion_token_ids=sample.token_ids,
            rollout_log_probs=sample.rollout_log_probs,
            advantages=advantages,
            loss_mask=loss_mask,
            policy_version=sample.policy_version,
            temperature=sample.temperature,
        )


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    """Result of one forward_backward over all its samples."""

    loss: float
    num_samples: int
    num_tokens: int
    """Tokens counted by the loss."""
    denominator: float
    """Divisor of the loss's sum over tokens."""
    metrics: Mapping[str, float]
    """Metrics by name; see docs/algorithms.md. A mean over no values is omitted."""
    num_micro_batches: int
    seconds: float
    log_probs: tuple[NDArray[np.float32], ...] = ()
    """[T] for each sample in `log_probs_of`. Empty if the trainer restarted before it answered."""


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    """Result of one optimizer step."""

    version: int
    """Version of the role after the step."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    seconds: float
    is_skipped: bool
    """Whether the step was skipped because the gradients were not finite. They are discarded."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of save or export_model."""

    path: str
    policy_version: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One event of a changeover. `stage` is None for events of the changeover as a whole."""

    changeover_id: str
    stage: Stage | None
    status: StageStatus
    time: float
    """Unix time in seconds."""
    seconds: float
    num_bytes: int
    error_reason: str
    error_message: str


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of a node as its coordinator reports it."""

    phase: Phase | None
    """None during a changeover."""
    stage: Stage | None
    """Last completed stage of the ring."""
    next_stage: Stage | None
    epoch: int
    policy_version: int | None
    """The version that rollout serves or last served; None before the first commit."""
    boot_id: str
    changeover_id: str
    """The changeover under way, or empty."""
    trainer_target: str
    rollout_target: str
    num_changeovers: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Watched:
    """A node's state and the event that led to it. `event` is None in the first answer."""

    state: NodeState
    event: StageEvent | None


@dataclass(frozen=True, slots=True)
class Changeover:
    """A changeover from the journal."""

    changeover_id: str
    target: Phase
    status: StageStatus
    policy_version: int
    start_time: float
    seconds: float
    stages: tuple[StageEvent, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State and limits of the trainer."""

    policy_version: int
    has_gradients: bool
    """Whether any role has accumulated gradients."""
    roles: tuple[Role, ...]
    """Roles that are trained."""
    critic_version: int | None
    """Optimizer steps of the critic; None without a critic."""
    num_ranks: int
    num_parameters: int
    vocab_size: int
    context_length: int
    micro_batch_tokens: int
    """Maximum tokens in a micro-batch, and so in a single sample."""
    model_path: str


@dataclass(frozen=True, slots=True)
class RolloutState:
    """State and limits of rollout."""

    policy_version: int | None
    """The version being served, or None."""
    is_poisoned: bool
    poison_reason: str
    num_running: int
    tp_size: int
    dp_size: int
    vocab_size: int
    context_length: int
    model_path: str
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion unless ignore_eos is set."""
