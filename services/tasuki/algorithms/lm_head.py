"""Log-probabilities of given tokens, and entropies, from hidden states; logits exist for one tile at a time.

A tile is all places by part of the vocabulary. A row of the weight's gradient is then one product over all places, added up in float32 and
rounded once; only the gradient of the hidden states, which is small, is added up over tiles.
Shape suffixes: N places, H hidden size, V vocabulary, C the vocabulary of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasuki.algorithms import lm_head_tiles
from tasuki.algorithms.lm_head_tiles import Places, RunningSoftmax, SoftmaxGradient, TileKernels

# Float32 logits of a tile: 64 MiB on a CPU, 512 MiB on a GPU, where small products leave processors idle.
_TILE_VALUES = {"cpu": 1 << 24, "cuda": 1 << 27}
_ALIGNMENT = 128


def token_log_probs(
    hidden_NH: Tensor, weight_VH: Tensor, token_ids_N: Tensor, *, temperature_N: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each token under softmax(logits / temperature), and the entropy of that distribution in nats.

    The logits are hidden_NH @ weight_VH.T in float32. hidden_NH, weight_VH: both float32 or both bfloat16; token_ids_N: int64 in
    [0, V); temperature_N: float32, greater than 0. softcap: logits are softcap * tanh(logits / softcap), as in Gemma 2.
    Returns two float32 tensors [N]. Both carry a gradient to hidden states and weight, in their dtype; the entropy's costs nothing unless
    it is used. Backward computes the logits again, except those of the last tile.
    """
    assert hidden_NH.dtype == weight_VH.dtype, f"hidden states in {hidden_NH.dtype}, weight in {weight_VH.dtype}"
    assert temperature_N.dtype == torch.float32, f"temperatures in {temperature_N.dtype}"
    return _TokenLogProbs.apply(hidden_NH, weight_VH, Places(token_ids_N.contiguous(), temperature_N.contiguous(), softcap))


class _TokenLogProbs(torch.autograd.Function):
    """Keeps two numbers per place for backward, and the last tile."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        kernels, tiles, hidden = _kernels(hidden_NH), _tiles(hidden_NH, weight_VH), _operand(hidden_NH)
        softmax, logits_NC = RunningSoftmax.empty(places), None
        buffer = _buffer(hidden_NH, tiles)
        for tile in tiles:
            logits_NC = _logits(hidden, _operand(weight_VH[tile]), buffer=buffer)
            kernels.fold(logits_NC, softmax, places, first_id=tile.start)
        entropy_N = softmax.entropy()
        ctx.save_for_backward(hidden_NH, weight_VH, softmax.log_sum(), entropy_N)
        ctx.places, ctx.buffer, ctx.last_logits_NC = places, buffer, logits_NC
        ctx.set_materialize_grads(False)
        return softmax.log_probs(), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the name of its first parameter
        ctx: Any, grad_log_probs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if grad_log_probs_N is None and grad_entropy_N is None:
            return None, None, None
        hidden_NH, weight_VH, log_sum_N, entropy_N = ctx.saved_tensors
        softmax = SoftmaxGradient.of(log_sum_N, entropy_N, grad_log_probs_N, grad_entropy_N, places=ctx.places)
        kernels, tiles, hidden = _kernels(hidden_NH), _tiles(hidden_NH, weight_VH), _operand(hidden_NH)
        grad_hidden, grad_weight_VH = _empty_gradients(hidden_NH, weight_VH, tiles, needs=ctx.needs_input_grad)
        # Overwritten below: a second backward pass computes the last tile as it does the others.
        logits_NC, ctx.last_logits_NC = ctx.last_logits_NC, None
        for tile in reversed(tiles):
            weight = _operand(weight_VH[tile])
            if logits_NC is None:
                logits_NC = _logits(hidden, weight, buffer=ctx.buffer)
            grad_NC = kernels.gradient(logits_NC, softmax, ctx.places, first_id=tile.start, dtype=hidden.dtype)
            if grad_hidden is not None:
                _add_product(grad_NC, weight, to=grad_hidden)
            if grad_weight_VH is not None:
                _write_product(grad_NC.T, hidden, to=grad_weight_VH[tile])
            # The next tile's take this memory.
            logits_NC = grad_NC = None
        return None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype), grad_weight_VH, None


def _kernels(hidden_NH: Tensor) -> TileKernels:
    if hidden_NH.is_cuda:
        from tasuki.algorithms import lm_head_triton

        return lm_head_triton
    return lm_head_tiles


def _tiles(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    """Of equal width, but for the last; none without places."""
    (num_places, hidden_size), vocab_size = hidden_NH.shape, weight_VH.shape[0]
    if num_places == 0:
        return []
    # Nor may the part of the weight, which a CPU computes with in float32, be larger.
    num_values = vocab_size * max(num_places, hidden_size)
    num_tiles = -(-num_values // _TILE_VALUES[hidden_NH.device.type])
    width = -(-vocab_size // num_tiles // _ALIGNMENT) * _ALIGNMENT
    return [slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)]


def _operand(x: Tensor) -> Tensor:
    """`x` as its products are computed. On a CPU none of 16-bit operands comes out in float32."""
    return x if x.is_cuda else x.float()


def _buffer(hidden_NH: Tensor, tiles: list[slice]) -> Tensor:
    """Memory for the logits of any tile."""
    width = tiles[0].stop if tiles else 0
    return torch.empty(len(hidden_NH) * width, dtype=torch.float32, device=hidden_NH.device)


def _logits(hidden: Tensor, weight: Tensor, *, buffer: Tensor) -> Tensor:
    shape = len(hidden), len(weight)
    logits_NC = buffer[: shape[0] * shape[1]].view(shape)
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.T, out=logits_NC)
    return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits_NC)


def _empty_gradients(
    hidden_NH: Tensor, weight_VH: Tensor, tiles: list[slice], *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Of the hidden states, zeros in float32, and of the weight, whose rows are all written if there is a tile."""
    new = torch.empty if tiles else torch.zeros
    return (
        torch.zeros(hidden_NH.shape, dtype=torch.float32, device=hidden_NH.device) if needs[0] else None,
        new(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device) if needs[1] else None,
    )


def _add_product(a: Tensor, b: Tensor, *, to: Tensor) -> None:
    """to: float32."""
    if a.dtype == torch.float32:
        to.addmm_(a, b)
    else:
        torch.addmm(to, a, b, out_dtype=torch.float32, out=to)


def _write_product(a: Tensor, b: Tensor, *, to: Tensor) -> None:
    """Added up in float32, rounded once where `to` is of another dtype."""
    if a.dtype == to.dtype:
        torch.mm(a, b, out=to)
    else:
        to.copy_(torch.mm(a, b))
