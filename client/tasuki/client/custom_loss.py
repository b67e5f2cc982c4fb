"""A loss that the caller computes: its gradient with respect to log-probs becomes the weights of a loss that is linear in them."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import Correction, LossConfig
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.client.types import TrainingSample
from tasuki.wire.errors import InvalidArgument

CustomLoss: TypeAlias = Callable[[Sequence[TrainingSample], Sequence[Any]], Any]
LINEAR = LossConfig(loss=PolicyGradientLoss(), correction=Correction(token_truncation=None), denominator=1.0)
"""The sum of -advantage * log_prob over tokens."""


def linearized(
    samples: Sequence[TrainingSample], log_probs: Sequence[NDArray[np.float32]], loss: CustomLoss
) -> tuple[float, list[TrainingSample]]:
    """Returns the loss, and samples for which LINEAR has its gradient. log_probs: [T] for each sample.

    Raises InvalidArgument if the loss or a gradient is no finite number, has another shape, or weighs a token that the mask excludes.
    """
    if not callable(loss):  # callers may have no types
        raise InvalidArgument("loss", f"is of type {type(loss).__name__}; give a function of samples and log-probs")
    samples, log_probs = tuple(samples), tuple(log_probs)  # the loss may not reorder what its gradients are paired with
    value, gradients = _differentiated(samples, log_probs, loss)
    if not math.isfinite(value):
        raise InvalidArgument("loss", f"returned {value}; return a finite number")
    if len(gradients) != len(samples):
        raise InvalidArgument("loss", f"returned {len(gradients)} gradients for {len(samples)} samples; return one for each")
    rows = [_row(gradient, index=index) for index, gradient in enumerate(gradients)]
    for index, (sample, row_T) in enumerate(zip(samples, rows, strict=True)):
        _check(sample, row_T, index=index)
    return value, [replace(sample, advantages=-row_T) for sample, row_T in zip(samples, rows, strict=True)]


def _row(gradient: Any, *, index: int) -> NDArray[np.float32]:
    with suppress(TypeError, ValueError, RuntimeError):
        row = np.asarray(gradient)
        if row.dtype.kind not in "cOSUMm":
            return row.astype(np.float32)
    problem = (
        f"returned {type(gradient).__name__} as gradient for samples[{index}]; give a real number for each token, detached"
    )
    raise InvalidArgument("loss", problem)


def _check(sample: TrainingSample, row_T: NDArray[np.float32], *, index: int) -> None:
    num_tokens = len(sample.completion_token_ids)
    if row_T.shape != (num_tokens,):
        problem = f"returned a gradient of shape {list(row_T.shape)} for samples[{index}]; give one number for each of {num_tokens} tokens"
        raise InvalidArgument("loss", problem)
    is_masked_T = np.asarray(sample.loss_mask) == 0.0 if len(sample.loss_mask) else np.zeros(num_tokens, dtype=np.bool_)
    for is_wrong_T, problem in (
        (~np.isfinite(row_T), "which is not finite"),
        (is_masked_T & (row_T != 0.0), "but its loss_mask is 0: multiply token losses by the mask"),
    ):
        if is_wrong_T.any():
            token = int(is_wrong_T.argmax())
            raise InvalidArgument("loss", f"has the gradient {row_T[token]:g} at token {token} of samples[{index}], {problem}")


def _differentiated(
    samples: Sequence[TrainingSample], log_probs: Sequence[NDArray[np.float32]], loss: CustomLoss
) -> tuple[float, Sequence[Any]]:
    """Calls the loss, with tensors if torch is installed. Returns its value and its gradients."""
    try:
        import torch
    except ModuleNotFoundError:
        return _pair(loss(samples, log_probs))
    with torch.enable_grad():
        leaves = tuple(torch.tensor(row_T, requires_grad=True) for row_T in log_probs)
        answer = loss(samples, leaves)
        if not isinstance(answer, torch.Tensor):
            return _pair(answer)
        if answer.numel() != 1 or not answer.requires_grad or answer.is_complex():
            problem = (
                f"returned a tensor of {answer.dtype} and shape {list(answer.shape)}, requires_grad={answer.requires_grad}"
            )
            raise InvalidArgument("loss", f"{problem}; return one real number, computed from log-probs that are not detached")
        gradients = torch.autograd.grad(answer.sum(), leaves, allow_unused=True)
    zeros = [np.zeros_like(row_T) for row_T in log_probs]
    return answer.item(), [zero if one is None else one for zero, one in zip(zeros, gradients, strict=True)]


def _pair(answer: Any) -> tuple[float, Sequence[Any]]:
    try:
        value, gradients = answer
        return float(value), list(gradients)
    except (TypeError, ValueError, RuntimeError):
        problem = (
            f"returned {type(answer).__name__}; return a tensor of one number, or the loss and its gradient for each sample"
        )
        raise InvalidArgument("loss", problem) from None
