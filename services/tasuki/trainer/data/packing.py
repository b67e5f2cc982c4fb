"""Positions of samples in a packed micro-batch: concatenated, with shared prompts stored once.

Shape suffixes: S samples, T packed tokens, N completion tokens, Q sequences, G shared prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.trainer.data.samples import NO_PREFIX, Samples, ranges, starts

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Order of the sequences: samples and prompts without continuations, then shared prompts, then their continuations, by prompt.

    The last token of a sample is not an input: nothing is predicted from it.
    """

    rows_T: Integers
    """Index of each packed token in the samples' token ids."""
    positions_T: Integers
    """Position ids; continuations count on from their prompt."""
    lengths_Q: Integers
    """Boundaries of sequences; None means 0."""
    places_N: Integers
    """Positions in T that predict the completion tokens, sample by sample. Samples share their prompt's last position."""
    num_alone: int
    """Number of tokens before the first shared prompt."""
    num_prefix_G: Integers
    """Number of tokens in each shared prompt."""
    num_suffix_G: Integers
    """Number of tokens that continue it, over all samples."""


def pack(samples: Samples) -> Packing:
    """Packs samples. Those with equal `prefix_S` share a prompt."""
    num_prompt_S, num_completion_S = samples.num_prompt_S, samples.num_completion_S
    first_S, num_suffix_S = starts(samples.num_tokens_S), num_completion_S - 1
    owner_G, group_S = _groups(samples)
    is_shared_S = group_S != NO_PREFIX
    total_G = np.bincount(group_S[is_shared_S], num_suffix_S[is_shared_S], len(owner_G)).astype(np.int64)
    alone, members = np.flatnonzero(~is_shared_S), np.flatnonzero(is_shared_S)
    members = members[np.argsort(group_S[members], kind="stable")]
    # A prompt without continuations comes first, like a sample that shares none.
    order_G = np.argsort(total_G > 0, kind="stable")
    prompts = owner_G[order_G]
    first_Q = np.concatenate((first_S[alone], first_S[prompts], (first_S + num_prompt_S)[members]))
    length_Q = np.concatenate(((num_prompt_S + num_suffix_S)[alone], num_prompt_S[prompts], num_suffix_S[members]))
    from_Q = np.concatenate((np.zeros(len(alone) + len(prompts), dtype=np.int64), num_prompt_S[members]))
    start_Q = starts(length_Q)
    ends = np.cumsum((len(alone), len(prompts)))
    before_S = np.empty(len(samples), dtype=np.int64)
    """The position before the one that predicts the second completion token."""
    before_S[alone] = start_Q[: ends[0]] + num_prompt_S[alone] - 1
    before_S[members] = start_Q[ends[1] :] - 1
    places_N = ranges(before_S, num_completion_S)
    last_G = np.empty(len(owner_G), dtype=np.int64)
    last_G[order_G] = start_Q[ends[0] : ends[1]] + num_prompt_S[prompts] - 1
    places_N[starts(num_completion_S)[members]] = last_G[group_S[members]]
    continued = prompts[total_G[order_G] > 0]
    num_prefix_G = num_prompt_S[continued]
    return Packing(
        rows_T=ranges(first_Q, length_Q),
        positions_T=ranges(from_Q, length_Q),
        lengths_Q=length_Q[length_Q > 0],
        places_N=places_N,
        num_alone=int(length_Q[: ends[1]].sum() - num_prefix_G.sum()),
        num_prefix_G=num_prefix_G,
        num_suffix_G=total_G[total_G > 0],
    )


def _groups(samples: Samples) -> tuple[Integers, Integers]:
    """One sample for each shared prompt, [G], and the prompt of each sample, [S], or NO_PREFIX."""
    alone_S = np.full(len(samples), NO_PREFIX, dtype=np.int64)
    if samples.prefix_S is None:
        return np.empty(0, dtype=np.int64), alone_S
    prefixes, owner, index_S, count = np.unique(samples.prefix_S, return_index=True, return_inverse=True, return_counts=True)
    is_shared = (count > 1) & (prefixes != NO_PREFIX)
    return owner[is_shared], np.where(is_shared[index_S], (np.cumsum(is_shared) - 1)[index_S], NO_PREFIX)
