"""Samples of a call as columns, for checks, planning and micro-batches.

Shape suffixes: S samples, T their tokens, N their completion tokens, concatenated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tasuki.models.routes import Routes

COLUMNS = ("loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "values", "returns")
"""Per-token fields that a sample may have."""
NO_PREFIX = -1
"""Value in `prefix_S` of a sample that shares its prompt with none."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleImages:
    """Images of samples. Shape suffixes: I images of all samples, U distinct ones, P their patches, D numbers of a patch, C channels,
    L levels."""

    num_images_S: NDArray[np.int64]
    image_I: NDArray[np.int64]
    """Which of the distinct images each one is, sample by sample."""
    start_I: NDArray[np.int64]
    """Place of its first token in its sample."""
    grids_U3: NDArray[np.int64]
    """Frames, rows and columns of patches."""
    levels_PD: NDArray[np.uint8]
    """Patches of the distinct images, one image after the other: of each channel its rows and columns, as 8 bits."""
    values_CL: NDArray[np.float32]
    """What the tower reads for each level."""
    merge_size: int
    """Rows and columns of patches that one token stands for."""

    @property
    def num_tokens_U(self) -> NDArray[np.int64]:
        """Tokens of each distinct image."""
        return self.grids_U3.prod(axis=1) // self.merge_size**2

    def of(self, sample: int) -> NDArray[np.int64]:
        """Which distinct images a sample has."""
        first = int(self.num_images_S[:sample].sum())
        return self.image_I[first : first + int(self.num_images_S[sample])]

    def select(self, chosen: NDArray[np.int64]) -> "SampleImages":
        """The images of these samples, among the same distinct ones."""
        rows_I = ranges(starts(self.num_images_S)[chosen], self.num_images_S[chosen])
        return replace(self, num_images_S=self.num_images_S[chosen], image_I=self.image_I[rows_I], start_I=self.start_I[rows_I])

    def used(self) -> "SampleImages":
        """Without distinct images that no sample has."""
        kept_U, image_I = np.unique(self.image_I, return_inverse=True)
        return replace(self, image_I=image_I, grids_U3=self.grids_U3[kept_U], levels_PD=self.levels_of(kept_U))

    def levels_of(self, kept_U: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Patches of these distinct images."""
        num_patches_U = self.grids_U3.prod(axis=1)
        return self.levels_PD[ranges(starts(num_patches_U)[kept_U], num_patches_U[kept_U])]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Prompts and completions of any lengths, without padding."""

    num_prompt_S: NDArray[np.int64]
    num_completion_S: NDArray[np.int64]
    policy_version_S: NDArray[np.uint64]
    """Version of the weights that generated the sample."""
    token_ids_T: NDArray[np.int32]
    """Prompt and completion of each sample in sequence."""
    columns: Mapping[str, NDArray[np.float32]]
    """[N] each, by names of COLUMNS; `loss_mask` is always present. Also the sampling `temperature`; 1 where absent. And `version_lag`, the
    versions by which a token is older than its sample, if samples of several versions are among them."""
    prefix_S: NDArray[np.int32] | None = None
    """Samples with equal numbers have the same prompt, computed once within a micro-batch; NO_PREFIX shares none."""
    images: SampleImages | None = None
    routes_TR: Routes | None = None
    """[T, R]: the experts of each token in every layer; zeros for a sample's last token. None: routers choose."""

    def __len__(self) -> int:
        return len(self.num_prompt_S)

    @property
    def num_tokens_S(self) -> NDArray[np.int64]:
        """Tokens of prompt plus completion."""
        return self.num_prompt_S + self.num_completion_S

    @property
    def is_completion_T(self) -> NDArray[np.bool_]:
        kinds = np.tile(np.array([False, True]), len(self))
        return np.repeat(kinds, np.stack((self.num_prompt_S, self.num_completion_S), axis=1).reshape(-1))

    def is_image_N(self, *, first: int = 0) -> NDArray[np.bool_]:
        """Which tokens of completions are an image's, from its token `first` on."""
        is_image_T = np.zeros(len(self.token_ids_T), np.bool_)
        if self.images is not None:
            start_I = np.repeat(starts(self.num_tokens_S), self.images.num_images_S) + self.images.start_I
            is_image_T[ranges(start_I + first, self.images.num_tokens_U[self.images.image_I] - first)] = True
        return is_image_T[self.is_completion_T]

    def expanded(self, length_T: NDArray[np.int64], images: SampleImages) -> "Samples":
        """The samples with each token, and its numbers, as often as `length_T` says."""
        ends, first_S = np.concatenate([[0], np.cumsum(length_T)]), starts(self.num_tokens_S)
        num_prompt_S = ends[first_S + self.num_prompt_S] - ends[first_S]
        length_N = length_T[self.is_completion_T]
        return replace(
            self,
            num_prompt_S=num_prompt_S,
            num_completion_S=ends[first_S + self.num_tokens_S] - ends[first_S] - num_prompt_S,
            token_ids_T=np.repeat(self.token_ids_T, length_T),
            columns={name: np.repeat(column_N, length_N) for name, column_N in self.columns.items()},
            images=images,
        )

    def select(self, indices: Sequence[int]) -> "Samples":
        """The samples at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows_T = ranges(starts(self.num_tokens_S)[chosen], self.num_tokens_S[chosen])
        rows_N = ranges(starts(self.num_completion_S)[chosen], self.num_completion_S[chosen])
        return Samples(
            num_prompt_S=self.num_prompt_S[chosen],
            num_completion_S=self.num_completion_S[chosen],
            policy_version_S=self.policy_version_S[chosen],
            token_ids_T=self.token_ids_T[rows_T],
            columns={name: column[rows_N] for name, column in self.columns.items()},
            prefix_S=None if self.prefix_S is None else self.prefix_S[chosen],
            images=None if self.images is None else self.images.select(chosen),
            routes_TR=None if self.routes_TR is None else self.routes_TR[rows_T],
        )


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Start of each run when they are concatenated."""
    return np.cumsum(lengths) - lengths


def ranges(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenates first, first + 1, ... for each of `lengths`."""
    return np.repeat(first - starts(lengths), lengths) + np.arange(int(lengths.sum()))
