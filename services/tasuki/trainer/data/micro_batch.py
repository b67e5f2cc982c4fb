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

# All ranks must run the model equally often. A rank without samples runs it on this token, which is not counted.
_DUMMY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One of `num_parts` equal parts of a micro-batch's tokens, computed by one rank."""

    index: int = 0
    num_parts: int = 1


WHOLE = SequencePart()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """Prompts computed once, as separate sequences, and the contiguous sequences that continue each.

    Positions count over all parts: prompts start at `first`, without gaps, and their continuations follow.
    """

    first: int
    cu_prefix_G: Tensor
    """[G + 1] int32: boundaries of the prompts, relative to `first`."""
    cu_suffix_G: Tensor
    """[G + 1] int32: boundaries of each prompt's continuations, relative to the end of the last prompt."""
    positions_X: Tensor
    """int64: positions of the tokens that continue a prompt."""
    num_prefix: tuple[int, ...]
    """Tokens of each prompt."""
    num_suffix: tuple[int, ...]
    """Tokens that continue each prompt."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Concatenated sequences without padding and their completion tokens; or one rank's part of the tokens.

    A sequence is a sample or, if samples share a prompt, the prompt or its continuations. The last token of a sample is not an input:
    nothing is predicted from it.
    """

    input_ids_T: Tensor
    """int64."""
    position_ids_T: Tensor
    """int64; restart at 0 in each sample."""
    cu_seqlens_S: Tensor
    """[S + 1] int32: boundaries of the sequences among the tokens of all parts."""
    max_seqlen: int
    """Length of the longest sequence."""
    places_N: Tensor
    """int64: positions in T whose outputs predict the completion tokens."""
    token_ids_N: Tensor
    """int64: the completion tokens."""
    temperature_N: Tensor
    """float32: sampling temperature of each completion token."""
    num_places: tuple[int, ...]
    """Number of completion tokens in each part."""
    order_N: Tensor | None = None
    """int64: permutation of all parts' completion tokens to the order of the samples; None if they are in order."""
    prompts: SharedPrompts | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of a loss: sequences for the model, and per-token fields of the completions."""

    tokens: TokenBatch
    loss: LossBatch


def token_batch(samples: Samples, *, device: torch.device, part: SequencePart = WHOLE) -> TokenBatch:
    """Packs `samples`, or one part of their tokens. A sequence of dummy tokens makes the parts equal.

    Without samples, each part has one dummy token and no completion token.
    """
    packed = pack(samples)
    num_dummies = -len(packed.rows_T) % part.num_parts if len(samples) else part.num_parts
    lengths_S = np.append(packed.lengths_Q, num_dummies) if num_dummies else packed.lengths_Q
    positions_T = np.append(packed.positions_T, np.arange(num_dummies))
    token_ids_T = np.append(samples.token_ids_T[packed.rows_T], [_DUMMY_TOKEN_ID] * num_dummies)
    # Ranks select their tokens by position, in this order.
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
    """Tensors of `samples` for a loss, and of one part of their tokens for the model.

    config: includes its denominator. policy_version: the current one.
    """
    assert config.denominator is not None, "set by the code that sees the whole call"
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
    """0, followed by the end of each run."""
    return np.concatenate(([0], np.cumsum(lengths_S)))


def _tensor(array: NDArray[Any], *, device: torch.device) -> Tensor:
    # Copies, since buffers from a wire are read-only.
    return torch.tensor(array, device=device)
