"""Tensors of one micro-batch, packed from samples without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasuki.v1.types_pb2 import TrainingSample

# The model has to run in every rank as often, so a rank without samples runs on this one token and counts nothing of it.
_DUMMY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences, and the completion tokens in them. B sequences padded on the right to L tokens, T completion tokens in all.

    The last token of a sequence is no input: nothing is predicted from it. Padding needs no mask, since no token looks ahead.
    """

    input_ids_BL: Tensor
    positions_T: Tensor
    """Places in the flattened [B * L] whose output predicts the completion tokens."""
    token_ids_T: Tensor
    num_completion_tokens: tuple[int, ...]
    """For each sample; empty for the dummy batch."""


@dataclass(frozen=True, slots=True)
class LossBatch:
    """A TokenBatch with what the loss needs for each completion token; all float32 but the last."""

    tokens: TokenBatch
    rollout_log_probs_T: Tensor
    advantages_T: Tensor
    loss_mask_T: Tensor
    ref_log_probs_T: Tensor | None
    is_current_T: Tensor
    """Whether the sample is of the policy version that is being trained: bool."""


def token_batch(samples: Sequence[TrainingSample], *, device: torch.device) -> TokenBatch:
    """The sequences of `samples`; without samples, one dummy token and no completion token."""
    if not samples:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        dummy = torch.full((1, 1), _DUMMY_TOKEN_ID, dtype=torch.int64, device=device)
        return TokenBatch(input_ids_BL=dummy, positions_T=empty, token_ids_T=empty, num_completion_tokens=())
    num_prompt = np.array([len(sample.prompt_token_ids) for sample in samples])
    num_completion = np.array([len(sample.completion_token_ids) for sample in samples])
    num_inputs = num_prompt + num_completion - 1
    longest = int(num_inputs.max())
    flat_inputs: list[int] = []
    flat_completions: list[int] = []
    for sample in samples:
        flat_inputs.extend(sample.prompt_token_ids)
        flat_inputs.extend(sample.completion_token_ids[:-1])
        flat_completions.extend(sample.completion_token_ids)
    input_ids_BL = np.full((len(samples), longest), _DUMMY_TOKEN_ID, dtype=np.int64)
    input_ids_BL[np.arange(longest) < num_inputs[:, None]] = flat_inputs
    # Completion token j of sample b is predicted at place num_prompt - 1 + j of row b.
    first = np.arange(len(samples)) * longest + num_prompt - 1
    positions_T = np.repeat(first, num_completion) + _count_up(num_completion)
    return TokenBatch(
        input_ids_BL=_tensor(input_ids_BL, device=device),
        positions_T=_tensor(positions_T, device=device),
        token_ids_T=_tensor(np.array(flat_completions, dtype=np.int64), device=device),
        num_completion_tokens=tuple(num_completion.tolist()),
    )


def loss_batch(samples: Sequence[TrainingSample], *, policy_version: int, device: torch.device) -> LossBatch:
    """The tensors of `samples` for the loss. `policy_version`: the present one."""
    lengths = [len(sample.completion_token_ids) for sample in samples]
    advantages = [
        sample.advantages if len(sample.advantages) == length else [sample.advantages[0]] * length
        for sample, length in zip(samples, lengths, strict=True)
    ]
    masks = [sample.loss_mask or [1.0] * length for sample, length in zip(samples, lengths, strict=True)]
    is_current = np.array([sample.policy_version == policy_version for sample in samples], dtype=bool)
    with_ref = bool(samples) and bool(samples[0].ref_log_probs)
    return LossBatch(
        tokens=token_batch(samples, device=device),
        rollout_log_probs_T=_flat([sample.rollout_log_probs for sample in samples], device=device),
        advantages_T=_flat(advantages, device=device),
        loss_mask_T=_flat(masks, device=device),
        ref_log_probs_T=_flat([sample.ref_log_probs for sample in samples], device=device) if with_ref else None,
        is_current_T=_tensor(np.repeat(is_current, np.array(lengths, dtype=np.int64)), device=device),
    )


def _count_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. length - 1 for each of `lengths`, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _flat(rows: Sequence[Sequence[float]], *, device: torch.device) -> Tensor:
    values: list[float] = []
    for row in rows:
        values.extend(row)
    return _tensor(np.array(values, dtype=np.float32), device=device)


def _tensor(array: NDArray[Any], *, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
