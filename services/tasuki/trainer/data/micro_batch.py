"""Tensors of one micro-batch, packed from samples without a loop over tokens.

Shape suffixes: S sequences, T their input tokens, N their completion tokens, G shared prompts, X tokens that continue them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasuki.algorithms.aggregation import denominator, token_weights
from tasuki.algorithms.batch import LossBatch
from tasuki.algorithms.loss_types import LossConfig
from tasuki.models.images import image_positions
from tasuki.models.routes import Routes
from tasuki.trainer.data.samples import NO_PREFIX, SampleImages, Samples, ranges, starts

# All ranks must run the model equally often. A rank without samples runs it on this token, which is not counted.
_DUMMY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One of `num_parts` equal parts of a micro-batch's tokens, computed by one rank."""

    index: int = 0
    num_parts: int = 1


WHOLE = SequencePart()
NO_IMAGE = -1


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


@dataclass(frozen=True, slots=True, eq=False)
class ImageBatch:
    """Images of a micro-batch, each once, and where their embeddings go in one part of the tokens."""

    distinct: SampleImages
    """Those of all micro-batches."""
    kept_U: NDArray[np.int64]
    """Which of them these are."""
    grids_U3: Tensor
    """int64."""
    places_I: Tensor
    """int64: positions in T."""
    rows_I: Tensor
    """int64: row of the embedding of each, among those of all images."""

    @property
    def levels_PD(self) -> Tensor:
        """uint8, in host memory: see SampleImages. Copied when the tower reads them."""
        return torch.from_numpy(self.distinct.levels_of(self.kept_U))


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
    positions_3T: Tensor | None = None
    """int64: time, row and column of each token, if the model has a vision tower."""
    images: ImageBatch | None = None
    """None without images."""
    routes_TR: Tensor | None = None
    """int16: the experts of each token in every layer, -1 where routers choose; None: everywhere. A pass without gradient writes their
    choice there."""
    num_dummies: int = 0
    """Number of last tokens that belong to no sample."""

    def choosing(self, route_width: int) -> "TokenBatch":
        """The batch with room for what routers choose, `route_width` numbers a token."""
        return replace(self, routes_TR=self.input_ids_T.new_full((len(self.input_ids_T), route_width), -1, dtype=torch.int16))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of a loss: sequences for the model, and per-token fields of the completions."""

    tokens: TokenBatch
    loss: LossBatch
    share: float
    """Its part of the loss's denominator; those of an optimizer step add up to 1."""


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
    positions_3T, images = (None, None) if samples.images is None else _images(samples, samples.images, packed, tokens, device)
    completion_N = samples.token_ids_T[samples.is_completion_T][order_N]
    temperature_N = samples.columns.get("temperature", np.ones(len(order_N), dtype=np.float32))[order_N]
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
        positions_3T=positions_3T,
        images=images,
        routes_TR=None
        if samples.routes_TR is None
        else _tensor(_routes(samples.routes_TR, packed, num_dummies)[tokens], device=device),
        num_dummies=min(width, max(0, num_dummies - width * (part.num_parts - 1 - part.index))),
    )


def _images(
    samples: Samples, images: SampleImages, packed: "Packing", tokens: slice, device: torch.device
) -> tuple[Tensor, ImageBatch | None]:
    """Positions [3, T] of a part of the tokens, 0 for dummies, and the images of all parts."""
    bounds_S = _cumulative(images.num_images_S)
    positions_3T = [np.empty((3, 0), dtype=np.int64)]
    for num_tokens, first, end in zip(samples.num_tokens_S.tolist(), bounds_S[:-1], bounds_S[1:], strict=True):
        grids = images.grids_U3[images.image_I[first:end]]
        starts_I = images.start_I[first:end].tolist()
        positions_3T.append(image_positions(num_tokens, starts=starts_I, grids=grids, merge_size=images.merge_size))
    length_I = images.num_tokens_U[images.image_I]
    first_I = np.repeat(starts(samples.num_tokens_S), images.num_images_S) + images.start_I
    image_T, row_T = np.full(len(samples.token_ids_T), NO_IMAGE), np.zeros(len(samples.token_ids_T), dtype=np.int64)
    rows = ranges(first_I, length_I)
    image_T[rows], row_T[rows] = np.repeat(images.image_I, length_I), ranges(np.zeros_like(length_I), length_I)
    image_T, row_T = image_T[packed.rows_T], row_T[packed.rows_T]
    kept_U, kept_T = np.unique(image_T[image_T != NO_IMAGE], return_inverse=True)
    row_T[image_T != NO_IMAGE] += starts(images.num_tokens_U[kept_U])[kept_T]
    part_3T = np.zeros((3, tokens.stop), dtype=np.int64)
    part_3T[:, : len(packed.rows_T)] = np.concatenate(positions_3T, axis=1)[:, packed.rows_T][:, : tokens.stop]
    places_I = np.flatnonzero(image_T[tokens] != NO_IMAGE)
    batch = ImageBatch(
        distinct=images,
        kept_U=kept_U,
        grids_U3=_tensor(images.grids_U3[kept_U], device=device),
        places_I=_tensor(places_I, device=device),
        rows_I=_tensor(row_T[tokens][places_I], device=device),
    )
    return _tensor(part_3T[:, tokens], device=device), batch if len(kept_U) else None


def _routes(routes_TR: Routes, packed: "Packing", num_dummies: int) -> NDArray[np.int16]:
    return np.pad(routes_TR[packed.rows_T].astype(np.int16), ((0, num_dummies), (0, 0)), constant_values=-1)


def unpacked_routes(samples: Samples, packed_TR: NDArray[np.int16]) -> NDArray[np.int16]:
    """[T, R] of the samples' own tokens; zeros for a sample's last token. packed_TR: of those that `token_batch` packs, and dummies."""
    packed, (owner_G, group_S), first_S = pack(samples), _groups(samples), starts(samples.num_tokens_S)
    routes_TR = np.zeros((len(samples.token_ids_T), packed_TR.shape[1]), np.int16)
    routes_TR[packed.rows_T] = packed_TR[: len(packed.rows_T)]
    members = np.flatnonzero(group_S != NO_PREFIX)
    rows, owned = (ranges(first_S[each], samples.num_prompt_S[members]) for each in (members, owner_G[group_S[members]]))
    routes_TR[rows] = routes_TR[owned]
    return routes_TR


def _shared_prompts(packed: "Packing", *, device: torch.device) -> SharedPrompts | None:
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
    is_current_N = np.repeat(samples.policy_version_S == policy_version, samples.num_completion_S)
    if "version_lag" in samples.columns:
        is_current_N &= samples.columns["version_lag"] == 0
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
        is_current_N=_tensor(is_current_N, device=device),
    )
    own = denominator(samples.columns["loss_mask"], samples.num_completion_S, config=replace(config, denominator=None))
    share = own / config.denominator if config.denominator else 0.0
    return MicroBatch(token_batch(samples, device=device, part=part), loss, share)


def _cumulative(lengths_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, followed by the end of each run."""
    return np.concatenate(([0], np.cumsum(lengths_S)))


def _tensor(array: NDArray[Any], *, device: torch.device) -> Tensor:
    # Copies, since buffers from a wire are read-only.
    return torch.tensor(array, device=device)


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
