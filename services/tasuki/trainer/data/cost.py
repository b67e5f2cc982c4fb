"""The cost of training on a sample, by its length."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.models.family import Model
from tasuki.models.shape import ModelShape
from tasuki.models.tower import Tower
from tasuki.trainer.data.samples import SampleImages

# FLOPs per weight and token: 2 in forward; in backward 2 for the gradient of the input and 2 for that of the weight.
_TRAINED, _FROZEN, _FORWARD = 6, 4, 2
# Matrix products of attention over the causal half of all pairs: 2 in forward, 5 in backward of flash attention, which repeats one.
_ATTENTION = 7
# Per query element of a token that continues a shared prompt. Merging the outputs of two calls and adding their gradients moves about
# 24 bytes, each worth 110 FLOPs of an H200. An estimate, not measured on a GPU.
_MERGE = 2640


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """FLOPs of forward and backward for a sample of L tokens, C of them a completion's: `linear * L + quadratic * L**2 + head * C`, less
    where attention has a window.

    Recomputed layers scale both terms almost equally, and scoring takes about a third of both, so ratios between samples also hold there.
    """

    linear: float
    quadratic: float
    """Sum over layers with full causal attention."""
    windows: tuple[tuple[int, float], ...] = ()
    """(window, coefficient of L**2 up to that length) of the other layers."""
    head: float = 0.0
    """Term for the LM head, which only positions that predict a completion token reach."""
    merge: float = 0.0
    """Extra cost of a token that continues a shared prompt."""
    patch: float = 0.0
    """Forward pass of the vision tower, for a patch of an image."""
    patch_pair: float = 0.0
    """Of its attention, for each pair of an image's patches."""

    def flops(self, lengths_S: NDArray[np.int64], *, completions_S: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Returns [S] for samples of `lengths_S` tokens; increases with the length.

        completions_S: those of a completion; by default all, an upper bound.
        """
        tokens_S = lengths_S.astype(np.float64)
        flops_S = self.linear * tokens_S + self.quadratic * tokens_S**2
        flops_S += self.head * (tokens_S if completions_S is None else completions_S)
        for window, quadratic in self.windows:
            flops_S += quadratic * (tokens_S**2 - np.maximum(tokens_S - window, 0) ** 2)
        return flops_S

    def image_flops(self, images: SampleImages) -> NDArray[np.float64]:
        """Returns [S]: the vision tower's, as if no two samples had an image in common."""
        num_patches_I = images.grids_U3.prod(axis=1)[images.image_I].astype(np.float64)
        flops_I = self.patch * num_patches_I + self.patch_pair * num_patches_I**2
        sample_I = np.repeat(np.arange(len(images.num_images_S)), images.num_images_S)
        return np.bincount(sample_I, flops_I, minlength=len(images.num_images_S)).astype(np.float64)


def sample_cost(model: Model, *, is_frozen: bool = False, trains_tower: bool = False) -> SampleCost:
    """Cost under `model`. is_frozen: whether only adapters are trained."""
    shape = model.shape
    per_weight = _FROZEN if is_frozen else _TRAINED
    tower = _tower_flops(shape.tower, num_passes=3 if trains_tower else 1) if shape.tower is not None else {}
    quadratic, merged = Counter[int | None](), 0
    for layer, window in enumerate(model.attention.windows):
        if not shape.is_delta(layer):
            quadratic[window] += _ATTENTION * shape.at(layer).query_size
            merged += _MERGE * shape.at(layer).query_size
    return SampleCost(
        linear=float(per_weight * _weights_per_token(shape)),
        head=float(per_weight * shape.num_outputs * shape.hidden_size),
        quadratic=float(quadratic.pop(None, 0)),
        windows=tuple((window, float(each)) for window, each in quadratic.items() if window is not None),
        merge=float(merged),
        **tower,
    )


def _tower_flops(tower: Tower, *, num_passes: int) -> dict[str, float]:
    """Of the matrices that multiply a patch, and those that multiply a square of them; attention as if it had no windows.

    num_passes: forward, and for a trained tower a backward that costs two.
    """
    matrices = {
        name: math.prod(shape) for name, shape in tower.parameters().items() if len(shape) > 1 and "pos_embed" not in name
    }
    of_squares = sum(numel for name, numel in matrices.items() if name.startswith(("merger", "deepstack")))
    numel = sum(matrices.values()) - of_squares + of_squares / tower.merge_size**2
    pair = 2 * tower.hidden_size * tower.depth
    return {"patch": float(_FORWARD * num_passes * numel), "patch_pair": float(_FORWARD * num_passes * pair)}


def _weights_per_token(shape: ModelShape) -> int:
    """Elements of the matrices that multiply one token: only the chosen experts, without embedding and LM head."""
    matrices = [weight for index in range(shape.num_layers) for weight in shape.layer(index).values()]
    chosen = sum(math.prod(matrix[1:]) * shape.experts_per_token for matrix in matrices if len(matrix) == 3)
    return chosen + sum(math.prod(matrix) for matrix in matrices if len(matrix) == 2)
