"""From samples of a call to micro-batches for every rank: checks and the plan, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument, VersionOrder


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a sample may not exceed."""

    vocab_size: int
    context_length: int
    micro_batch_tokens: int
    """Most padded tokens in a micro-batch, so also in a sample."""


MicroBatchPlan = list[list[list[int]]]
"""[rank][micro-batch] -> positions of samples in the call. Every rank has as many micro-batches; the last of them may be empty."""


def check_sequences(samples: Sequence[TrainingSample], *, limits: BatchLimits) -> None:
    """Raises InvalidArgument naming the first sample whose tokens cannot be scored."""
    if not samples:
        raise InvalidArgument("samples", "the call has no samples")
    longest = min(limits.context_length, limits.micro_batch_tokens)
    for index, sample in enumerate(samples):
        num_prompt, num_completion = len(sample.prompt_token_ids), len(sample.completion_token_ids)
        if not num_prompt:
            raise InvalidArgument(f"samples[{index}].prompt_token_ids", "empty; a prompt has at least one token")
        if not num_completion:
            raise InvalidArgument(f"samples[{index}].completion_token_ids", "empty; a completion has at least one token")
        if num_prompt + num_completion > longest:
            raise _too_long(index, num_tokens=num_prompt + num_completion, limits=limits)
    for field in ("prompt_token_ids", "completion_token_ids"):
        _check_values(
            samples,
            field=field,
            is_wrong=lambda ids: (ids < 0) | (ids >= limits.vocab_size),
            problem=f"is no token id of this model; give 0 to {limits.vocab_size - 1}",
        )


def check_loss_fields(samples: Sequence[TrainingSample], *, kl_coef: float) -> None:
    """Raises InvalidArgument naming the first sample and field that the loss cannot use. Call check_sequences before."""
    with_ref = bool(samples[0].ref_log_probs)
    for index, sample in enumerate(samples):
        num_tokens = len(sample.completion_token_ids)
        _check_length(index, "rollout_log_probs", len(sample.rollout_log_probs), allowed=(num_tokens,))
        _check_length(index, "advantages", len(sample.advantages), allowed=(num_tokens, 1))
        _check_length(index, "loss_mask", len(sample.loss_mask), allowed=(num_tokens, 0))
        _check_length(index, "ref_log_probs", len(sample.ref_log_probs), allowed=(num_tokens, 0))
        if kl_coef != 0.0 and not sample.ref_log_probs:
            raise InvalidArgument(f"samples[{index}].ref_log_probs", f"empty, but kl_coef is {kl_coef:g}")
        if bool(sample.ref_log_probs) is not with_ref:
            raise InvalidArgument(f"samples[{index}].ref_log_probs", "give them for every sample or for none")
    for field in ("advantages", "rollout_log_probs", "ref_log_probs"):
        _check_values(samples, field=field, is_wrong=lambda values: ~np.isfinite(values), problem="is not finite")
    _check_values(samples, field="loss_mask", is_wrong=lambda mask: (mask != 0) & (mask != 1), problem="is neither 0 nor 1")


def check_versions(samples: Sequence[TrainingSample], *, policy_version: int) -> None:
    """Raises VersionOrder naming the first sample that a policy made which this trainer never had."""
    for index, sample in enumerate(samples):
        if sample.policy_version > policy_version:
            raise VersionOrder(
                f"samples[{index}].policy_version: {sample.policy_version} is above the trainer's {policy_version}, so other weights made "
                "it; load the checkpoint that they belong to, or generate anew",
                have=policy_version,
                want=sample.policy_version,
            )


def count_loss_tokens(samples: Sequence[TrainingSample]) -> int:
    """Tokens that the loss counts. Raises InvalidArgument when every token is masked."""
    num_tokens = sum(_num_loss_tokens(sample) for sample in samples)
    if not num_tokens:
        raise InvalidArgument("samples[].loss_mask", "masks every token of the call; at least one must count")
    return num_tokens


def count_gap_tokens(samples: Sequence[TrainingSample], *, policy_version: int) -> int:
    """Counted tokens of samples that the present policy version made."""
    return sum(_num_loss_tokens(sample) for sample in samples if sample.policy_version == policy_version)


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Balanced over ranks by tokens, few micro-batches, none above `max_tokens` padded tokens.

    lengths: tokens of each sample, none above `max_tokens`. Samples of like length share a micro-batch, which keeps padding small.
    """
    descending = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # Dealt in snake order (0 1 2 2 1 0 0 1 ...): every rank gets as many samples and nearly as many tokens.
    snake = [*range(num_ranks), *reversed(range(num_ranks))]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, index in enumerate(descending):
        dealt[snake[turn % len(snake)]].append(index)
    plan = [_cut(indices, lengths=lengths, max_tokens=max_tokens) for indices in dealt]
    num_micro_batches = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[] for _ in range(num_micro_batches - len(micro_batches))] for micro_batches in plan]


def sample_length(sample: TrainingSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.completion_token_ids)


def _cut(indices: list[int], *, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts samples, longest first, into runs of at most `max_tokens` padded tokens."""
    micro_batches: list[list[int]] = []
    start = 0
    while start < len(indices):
        longest = lengths[indices[start]]
        assert longest <= max_tokens, "check_sequences refuses such a sample"
        end = start + max_tokens // longest
        micro_batches.append(indices[start:end])
        start = end
    return micro_batches


def _num_loss_tokens(sample: TrainingSample) -> int:
    return int(sum(sample.loss_mask)) if sample.loss_mask else len(sample.completion_token_ids)


def _too_long(index: int, *, num_tokens: int, limits: BatchLimits) -> InvalidArgument:
    if num_tokens > limits.context_length:
        limit, name = limits.context_length, "the model's context length"
    else:
        limit, name = limits.micro_batch_tokens, "trainer.micro_batch_tokens"
    problem = f"prompt and completion have {num_tokens} tokens, above {name} of {limit}"
    return InvalidArgument(f"samples[{index}]", problem, num_tokens=num_tokens, limit=limit)


def _check_length(index: int, field: str, length: int, *, allowed: tuple[int, ...]) -> None:
    if length not in allowed:
        expected = " or ".join(str(each) for each in allowed)
        raise InvalidArgument(
            f"samples[{index}].{field}", f"has {length} entries; give {expected}, for the completion's tokens"
        )


def _check_values(
    samples: Sequence[TrainingSample], *, field: str, is_wrong: Callable[[NDArray[np.float64]], NDArray[np.bool_]], problem: str
) -> None:
    """One vectorized pass over a per-token field of all samples; only a failure is searched for its place."""
    flat: list[float] = []
    for sample in samples:
        flat.extend(getattr(sample, field))
    wrong = np.flatnonzero(is_wrong(np.asarray(flat, dtype=np.float64)))
    if not len(wrong):
        return
    position = int(wrong[0])
    for index, sample in enumerate(samples):
        length = len(getattr(sample, field))
        if position < length:
            raise InvalidArgument(f"samples[{index}].{field}[{position}]", f"{flat[int(wrong[0])]:g} {problem}")
        position -= length
