"""What goes into the verbs and what comes out of them: plain values, with numpy arrays for what has one entry per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Phase(StrEnum):
    """Who holds the GPUs."""

    TRAIN = "TRAIN"
    ROLLOUT = "ROLLOUT"


class Stage(StrEnum):
    """One step of a changeover, in the order of the ring."""

    LOAD_WEIGHTS = "LOAD_WEIGHTS"
    RESUME_WEIGHTS = "RESUME_WEIGHTS"
    SYNC = "SYNC"
    OFFLOAD = "OFFLOAD"
    RESUME_KV = "RESUME_KV"
    DRAIN = "DRAIN"
    PAUSE_KV = "PAUSE_KV"
    PAUSE_WEIGHTS = "PAUSE_WEIGHTS"
    LOAD_TRAINER = "LOAD_TRAINER"


class StageStatus(StrEnum):
    """How far a stage or a changeover is."""

    STARTED = "STARTED"
    DONE = "DONE"
    FAILED = "FAILED"
    UNDONE = "UNDONE"
    HELD = "HELD"


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "STOP"
    """An end-of-sequence or stop token was sampled; it is the last token."""
    LENGTH = "LENGTH"
    CUT = "CUT"
    """Cut by a drain; the tokens so far are valid for the sample's policy version."""


class Role(StrEnum):
    """What a network of the trainer is for."""

    POLICY = "POLICY"
    REFERENCE = "REFERENCE"
    """Frozen weights that training started from."""
    CRITIC = "CRITIC"
    """Gives values to tokens; only where the node has a table [trainer.critic]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """SGLang's sampling parameters by their names; None takes SGLang's default."""

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
    """Beside those of the model, see RolloutState."""
    ignore_eos: bool | None = None
    """No token ends a completion, also none of stop_token_ids."""
    sampling_seed: int | None = None
    """Every sample is drawn by a seed made from this, the position of its prompt and its sample_index; not on a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion as rollout made it."""

    prompt_index: int
    sample_index: int
    token_ids: NDArray[np.int32]
    """[T], without the prompt."""
    rollout_log_probs: NDArray[np.float32]
    """[T], natural logarithms, under `temperature` and penalties; what top_p, top_k and min_p leave out still has its share."""
    finish_reason: FinishReason
    policy_version: int
    temperature: float = 1.0
    """That rollout_log_probs are under; 1 for greedy samples."""
    has_exact_log_probs: bool = True
    """Whether every token was drawn from softmax(logits / temperature). False for greedy samples, and where top_p, top_k, min_p,
    min_new_tokens or a penalty changed what could be drawn: an importance ratio by these log-probs is then biased."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One sequence to learn from or to score. Per-token fields have T entries, one for each completion token, or none."""

    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    completion_token_ids: Sequence[int] | NDArray[np.int32]
    """[T], at least one."""
    rollout_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Needed by every policy loss but SftLoss."""
    advantages: float | Sequence[float] | NDArray[np.float32] = ()
    """[T], or one number for the whole completion. Needed by every policy loss but SftLoss."""
    ref_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Needed when kl_coef is not 0."""
    loss_mask: Sequence[float] | NDArray[np.float32] = ()
    """0 and 1; empty counts every token."""
    policy_version: int = 0
    """Version of the weights that made the sample."""
    temperature: float | None = None
    """That the sample was drawn with; None is 1. `TrainingSample.of` takes it from the sample."""
    old_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """The policy's before the first of several steps on the batch. Needed with OldPolicy.GIVEN."""
    values: Sequence[float] | NDArray[np.float32] = ()
    """The critic's before the first step on the batch. Needed by a clipped ValueLoss."""
    returns: Sequence[float] | NDArray[np.float32] = ()
    """What the values should be. Needed by ValueLoss."""

    @classmethod
    def of(
        cls,
        sample: Sample,
        *,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        advantages: float | Sequence[float] | NDArray[np.float32] = (),
        loss_mask: Sequence[float] | NDArray[np.float32] = (),
    ) -> TrainingSample:
        """What rollout generated, with all that training must know of it: log-probs, their temperature, and the policy's version."""
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
    """One forward_backward, over all its samples."""

    loss: float
    num_samples: int
    num_tokens: int
    """That counted in the loss."""
    denominator: float
    """What the sum over tokens was divided by."""
    metrics: Mapping[str, float]
    """By name, see docs/algorithms.md; a mean over nothing is left out."""
    num_micro_batches: int
    seconds: float
    log_probs: tuple[NDArray[np.float32], ...] = ()
    """[T] of each sample that `log_probs_of` named; none where the trainer restarted before it could answer."""


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    """One optimizer step."""

    version: int
    """Of the role, after the step."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    seconds: float
    is_skipped: bool
    """Whether the gradients were not finite, and were dropped without a step."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What save and export_model wrote."""

    path: str
    policy_version: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One piece of news of a changeover; `stage` is None in news of the changeover as a whole."""

    changeover_id: str
    stage: Stage | None
    status: StageStatus
    time: float
    """Seconds since 1970."""
    seconds: float
    num_bytes: int
    error_reason: str
    error_message: str


@dataclass(frozen=True, slots=True)
class NodeState:
    """Where a node is."""

    phase: Phase | None
    """None in the middle of a changeover."""
    stage: Stage | None
    """Last completed stage of the ring."""
    next_stage: Stage | None
    epoch: int
    policy_version: int | None
    """That rollout serves or last served; None before the first commit."""
    boot_id: str
    changeover_id: str
    """Running changeover, or empty."""
    trainer_target: str
    rollout_target: str
    num_changeovers: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Watched:
    """The state, and what changed; `event` is None in the first answer."""

    state: NodeState
    event: StageEvent | None


@dataclass(frozen=True, slots=True)
class Changeover:
    """One changeover from the journal."""

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
    """What a trainer has, and what it takes."""

    policy_version: int
    has_gradients: bool
    """Of any role."""
    roles: tuple[Role, ...]
    """That are trained."""
    critic_version: int | None
    """Optimizer steps behind the critic's weights; None without a critic."""
    num_ranks: int
    num_parameters: int
    vocab_size: int
    context_length: int
    micro_batch_tokens: int
    """Most tokens of the samples in one micro-batch, so also of a sample."""
    model_path: str


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What rollout serves, and what it takes."""

    policy_version: int | None
    """That is served; None while none is."""
    is_poisoned: bool
    poison_reason: str
    num_running: int
    tp_size: int
    dp_size: int
    vocab_size: int
    context_length: int
    model_path: str
    stop_token_ids: tuple[int, ...] = ()
    """That end a completion unless ignore_eos is set."""
