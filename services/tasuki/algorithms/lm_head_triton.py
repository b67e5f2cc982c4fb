"""Triton kernels for the tiles of lm_head.py, equivalent to lm_head_tiles.py. Imported only where there is a GPU."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# Triton compiles these functions; annotations mark constants. `num_warps` is Triton's own parameter.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tasuki.algorithms import lm_head_tiles
from tasuki.algorithms.lm_head_tiles import Places, RunningSoftmax, SoftmaxGradient

_FLOOR = tl.constexpr(lm_head_tiles.FLOOR)
# Columns that a program processes at a time, chosen by measurement on an H200.
_FOLD_COLUMNS, _FOLD_WARPS = 1024, 2
_GRADIENT_COLUMNS, _GRADIENT_WARPS = 4096, 8


def fold(logits_NC: Tensor, softmax: RunningSoftmax, places: Places, *, first_id: int) -> None:
    """See TileKernels. One program per position reads its row once."""
    num_places, num_columns = logits_NC.shape
    _fold[(num_places,)](
        logits_NC,
        softmax.values_4N,
        places.token_ids_N,
        places.temperature_N,
        places.softcap,
        num_places,
        num_columns,
        first_id,
        COLUMNS=_FOLD_COLUMNS,
        num_warps=_FOLD_WARPS,
    )


def gradient(logits_NC: Tensor, softmax: SoftmaxGradient, places: Places, *, first_id: int, dtype: torch.dtype) -> Tensor:
    """See TileKernels. Reads the logits once and leaves them unchanged."""
    num_places, num_columns = logits_NC.shape
    grad_NC = torch.empty_like(logits_NC, dtype=dtype)
    _gradient[(num_places, triton.cdiv(num_columns, _GRADIENT_COLUMNS))](
        logits_NC,
        grad_NC,
        softmax.log_sum_N,
        softmax.entropy_N,
        softmax.log_prob_factor_N,
        softmax.entropy_factor_N,
        places.token_ids_N,
        places.temperature_N,
        places.softcap,
        num_columns,
        first_id,
        COLUMNS=_GRADIENT_COLUMNS,
        num_warps=_GRADIENT_WARPS,
    )
    return grad_NC


@triton.jit
def _tanh(x):
    power = tl.exp(-2 * tl.abs(x))
    result = (1 - power) / (1 + power)
    return tl.where(x < 0, -result, result)


@triton.jit
def _raised(x):
    """Raised to the floor; NaN stays."""
    return tl.where(x < _FLOOR, _FLOOR, x)


@triton.jit(do_not_specialize=["first_id"])
def _fold(logits, softmax, token_ids, temperatures, softcap, num_places, num_columns, first_id, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * num_columns
    temperature = tl.load(temperatures + place)
    old_max = tl.load(softmax + place)
    max_ = old_max
    sums = tl.zeros((COLUMNS,), tl.float32)
    products = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_there = columns < num_columns
        scaled = tl.load(row + columns, mask=is_there, other=0.0)
        if softcap is not None:
            scaled = _tanh(scaled / softcap) * softcap
        scaled = tl.where(is_there, scaled / temperature, float("-inf"))
        new_max = tl.maximum(max_, tl.max(scaled, axis=0))
        shift = _raised(max_ - new_max)
        factor = tl.exp(shift)
        scaled = _raised(scaled - new_max)
        power = tl.exp(scaled)
        products = (products + sums * shift) * factor + power * scaled
        sums = sums * factor + power
        max_ = new_max
    # Rescales the values of earlier tiles to the new maximum.
    shift = _raised(old_max - max_)
    factor = tl.exp(shift)
    old_sum = tl.load(softmax + num_places + place)
    old_product = tl.load(softmax + 2 * num_places + place)
    tl.store(softmax + place, max_)
    tl.store(softmax + num_places + place, old_sum * factor + tl.sum(sums, axis=0))
    tl.store(softmax + 2 * num_places + place, (old_product + old_sum * shift) * factor + tl.sum(products, axis=0))
    column = tl.load(token_ids + place) - first_id
    if (column >= 0) & (column < num_columns):
        logit = tl.load(row + column)
        if softcap is not None:
            logit = _tanh(logit / softcap) * softcap
        tl.store(softmax + 3 * num_places + place, logit / temperature)


@triton.jit(do_not_specialize=["first_id"])
def _gradient(
    logits,
    grads,
    log_sums,
    entropies,
    log_prob_factors,
    entropy_factors,
    token_ids,
    temperatures,
    softcap,
    num_columns,
    first_id,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < num_columns
    scaled = tl.load(logits + place * num_columns + columns, mask=is_there, other=0.0)
    slope = 1.0
    if softcap is not None:
        capped = _tanh(scaled / softcap)
        slope = 1 - capped * capped
        scaled = capped * softcap
    log_prob = scaled / tl.load(temperatures + place) - tl.load(log_sums + place)
    prob = tl.exp(log_prob)
    grad = tl.zeros((COLUMNS,), tl.float32)
    if log_prob_factors is not None:
        factor = tl.load(log_prob_factors + place)
        column = tl.load(token_ids + place) - first_id
        grad = tl.where(columns == column, factor * (1 - prob), -factor * prob)
    if entropy_factors is not None:
        grad -= tl.load(entropy_factors + place) * prob * (_raised(log_prob) + tl.load(entropies + place))
    tl.store(grads + place * num_columns + columns, (grad * slope).to(grads.dtype.element_ty), mask=is_there)
