"""Tensors of one micro-batch, packed from samples without a loop over tokens.

Shape suffixes: S sequences, T their input tokens, N their completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasuki.algorithms.aggregation import token_weights
from tasuki.algorithms.batch import LossBatch
from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.samples import Samples, ranges, starts

# The model has to run in every rank as often, so a rank without samples runs on this one token and counts nothing of it.
_DUMMY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences one after the other, without padding, and the completion tokens in them.

    The last token of a sequence is no input: nothing is predicted from it.
    """

    input_ids_T: Tensor
    """int64."""
    position_ids_T: Tensor
    """int64; they begin at 0 in each sequence."""
    cu_seqlens_S: Tensor
    """[S + 1] int32: sequence s is input_ids_T[cu_seqlens_S[s] : cu_seqlens_S[s + 1]]."""
    max_seqlen: int
    """Length of the longest sequence."""
    places_N: Tensor
    """int64: places in T whose output predicts the completion tokens."""
    token_ids_N: Tensor
    """int64: the completion tokens."""
    temperature_N: Tensor
    """float32: that each completion token was drawn with."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens_S) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a loss is computed from: sequences for the model, and what the loss needs for each completion token."""

    tokens: TokenBatch
    loss: LossBatch


def token_batch(samples: Samples, *, device: torch.device) -> TokenBatch:
    """The sequences of `samples`; without samples, one dummy token and no completion token."""
    if not len(samples):
        return _dummy(device)
    num_inputs_S = samples.num_tokens_S - 1
    first_S = starts(num_inputs_S)
    rows_T = ranges(starts(samples.num_tokens_S), num_inputs_S)
    return TokenBatch(
        input_ids_T=_tensor(samples.token_ids_T[rows_T].astype(np.int64), device=device),
        position_ids_T=_tensor(ranges(np.zeros_like(first_S), num_inputs_S), device=device),
        cu_seqlens_S=_tensor(_cumulative(num_inputs_S).astype(np.int32), device=device),
        max_seqlen=int(num_inputs_S.max()),
        # Completion token j of a sequence is predicted at its place num_prompt - 1 + j.
        places_N=_tensor(ranges(first_S + samples.num_prompt_S - 1, samples.num_completion_S), device=device),
        token_ids_N=_tensor(samples.token_ids_T[samples.is_completion_T].astype(np.int64), device=device),
        temperature_N=_tensor(np.repeat(samples.temperature_S, samples.num_completion_S), device=device),
    )


def micro_batch(samples: Samples, *, config: LossConfig, policy_version: int, device: torch.device) -> MicroBatch:
    """The tensors of `samples` for a loss. config: with its denominator. policy_version: the present one."""
    assert config.denominator is not None, "whoever sees the whole call sets it"
    columns = {name: _tensor(column_N, device=device) for name, column_N in samples.columns.items()}
    weights_N = token_weights(
        samples.columns["loss_mask"], samples.num_completion_S, config=config, denominator=config.denominator
    )
    is_current_S = samples.policy_version_S == policy_version
    loss = LossBatch(
        cu_seqlens_S=_tensor(_cumulative(samples.num_completion_S), device=device),
        weights_N=_tensor(weights_N, device=device),
        loss_mask_N=columns["loss_mask"],
        rollout_log_probs_N=columns.get("rollout_log_probs"),
        old_log_probs_N=columns.get("old_log_probs"),
        advantages_N=columns.get("advantages"),
        ref_log_probs_N=columns.get("ref_log_probs"),
        values_N=columns.get("values"),
        returns_N=columns.get("returns"),
        is_current_N=_tensor(np.repeat(is_current_S, samples.num_completion_S), device=device),
    )
    return MicroBatch(token_batch(samples, device=device), loss)


def _dummy(device: torch.device) -> TokenBatch:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return TokenBatch(
        input_ids_T=torch.full((1,), _DUMMY_TOKEN_ID, dtype=torch.int64, device=device),
        position_ids_T=torch.zeros(1, dtype=torch.int64, device=device),
        cu_seqlens_S=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen=1,
        places_N=empty,
        token_ids_N=empty,
        temperature_N=torch.empty(0, dtype=torch.float32, device=device),
    )


def _cumulative(lengths_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, and where each run ends."""
    return np.concatenate(([0], np.cumsum(lengths_S)))


def _tensor(array: NDArray[Any], *, device: torch.device) -> Tensor:
    # A copy: what came off a wire is read-only.
    return torch.tensor(array, device=device)
