"""Tensors of one micro-batch, packed from samples without a loop over tokens.

Shape suffixes: S sequences, T their input tokens, N their completion tokens, G shared prompts, X tokens that continue them.
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
from tasuki.trainer.data.packing import Packing, pack
from tasuki.trainer.data.samples import Samples

# The model has to run in every rank as often, so a rank without samples runs on this token alone and counts nothing of it.
_DUMMY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Which of `num_parts` equal parts of a micro-batch's tokens a rank computes."""

    index: int = 0
    num_parts: int = 1


WHOLE = SequencePart()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """Prompts that are computed once, in sequences of their own, and the sequences that continue them: those of a prompt in a row.

    Places count from the first token of all parts: prompts are from `first` on, without a gap, and what continues them follows.
    """

    first: int
    cu_prefix_G: Tensor
    """[G + 1] int32: where each prompt begins and ends, from `first`."""
    cu_suffix_G: Tensor
    """[G + 1] int32: the same of what continues each, from the end of the last prompt."""
    positions_X: Tensor
    """int64: of the tokens that continue a prompt."""
    num_prefix: tuple[int, ...]
    """Tokens of each prompt."""
    num_suffix: tuple[int, ...]
    """Tokens that continue each."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences one after the other, without padding, and the completion tokens in them; or one rank's part of their tokens.

    A sequence is a sample, or where samples share a prompt the prompt, and what continues it. The last token of a sample is no input:
    nothing is predicted from it.
    """

    input_ids_T: Tensor
    """int64."""
    position_ids_T: Tensor
    """int64; they begin at 0 in each sample."""
    cu_seqlens_S: Tensor
    """[S + 1] int32: where each sequence begins and ends among the tokens of all parts."""
    max_seqlen: int
    """Length of the longest sequence."""
    places_N: Tensor
    """int64: places in T whose output predicts the completion tokens."""
    token_ids_N: Tensor
    """int64: the completion tokens."""
    temperature_N: Tensor
    """float32: that each completion token was drawn with."""
    num_places: tuple[int, ...]
    """Completion tokens of each part."""
    order_N: Tensor | None = None
    """int64: of all parts, which of the completion tokens, as they are here, comes n-th in the samples; None where they are in order."""
    prompts: SharedPrompts | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens_S) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a loss is computed from: sequences for the model, and what the loss needs for each completion token."""

    tokens: TokenBatch
    loss: LossBatch


def token_batch(samples: Samples, *, device: torch.device, part: SequencePart = WHOLE) -> TokenBatch:
    """The sequences of `samples`, or a part of their tokens. Dummy tokens, a sequence by themselves, make the parts equal.

    Without samples, a dummy token for each part and no completion token.
    """
    packed = pack(samples)
    num_dummies = -len(packed.rows_T) % part.num_parts if len(samples) else part.num_parts
    lengths_S = np.append(packed.lengths_Q, num_dummies) if num_dummies else packed.lengths_Q
    positions_T = np.append(packed.positions_T, np.arange(num_dummies))
    token_ids_T = np.append(samples.token_ids_T[packed.rows_T], [_DUMMY_TOKEN_ID] * num_dummies)
    # Ranks take the places of their tokens, in the order of these.
    order_N = np.argsort(packed.places_N, kind="stable")
    places_N = packed.places_N[order_N]
    width = len(token_ids_T) // part.num_parts
    bounds = np.searchsorted(places_N, width * np.arange(part.num_parts + 1))
    tokens, places = (
        slice(bound[part.index], bound[part.index + 1]) for bound in (width * np.arange(part.num_parts + 1), bounds)
    )
    completion_N = samples.token_ids_T[samples.is_completion_T][order_N]
    temperature_N = np.repeat(samples.temperature_S, samples.num_completion_S)[order_N]
    return TokenBatch(
        input_ids_T=_tensor(token_ids_T[tokens].astype(np.int64), device=device),
        position_ids_T=_tensor(positions_T[tokens], device=device),
        cu_seqlens_S=_tensor(_cumulative(lengths_S).astype(np.int32), device=device),
        max_seqlen=int(lengths_S.max()),
        places_N=_tensor(places_N[places] - width * part.index, device=device),
        token_ids_N=_tensor(completion_N[places].astype(np.int64), device=device),
        temperature_N=_tensor(temperature_N[places], device=device),
        num_places=tuple(np.diff(bounds).tolist()),
        order_N=_tensor(np.argsort(order_N), device=device) if (np.diff(packed.places_N) < 0).any() else None,
        prompts=_shared_prompts(packed, device=device),
    )


def _shared_prompts(packed: Packing, *, device: torch.device) -> SharedPrompts | None:
    if not len(packed.num_prefix_G):
        return None
    first_suffix = packed.num_alone + int(packed.num_prefix_G.sum())
    return SharedPrompts(
        first=packed.num_alone,
        cu_prefix_G=_tensor(_cumulative(packed.num_prefix_G).astype(np.int32), device=device),
        cu_suffix_G=_tensor(_cumulative(packed.num_suffix_G).astype(np.int32), device=device),
        positions_X=_tensor(packed.positions_T[first_suffix:], device=device),
        num_prefix=tuple(packed.num_prefix_G.tolist()),
        num_suffix=tuple(packed.num_suffix_G.tolist()),
    )


def micro_batch(
    samples: Samples, *, config: LossConfig, policy_version: int, device: torch.device, part: SequencePart = WHOLE
) -> MicroBatch:
    """The tensors of `samples` for a loss, and of a part of their tokens for the model.

    config: with its denominator. policy_version: the present one.
    """
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
    return MicroBatch(token_batch(samples, device=device, part=part), loss)


def _cumulative(lengths_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, and where each run ends."""
    return np.concatenate(([0], np.cumsum(lengths_S)))


def _tensor(array: NDArray[Any], *, device: torch.device) -> Tensor:
    # A copy: what came off a wire is read-only.
    return torch.tensor(array, device=device)
