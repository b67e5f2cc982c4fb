"""Log-probabilities of given tokens, and entropies, from hidden states, with logits for only one tile at a time.

A tile is all positions by part of the vocabulary. Each row of the weight's gradient is then a single product over all positions,
accumulated in float32 and rounded once. Only the small gradient of the hidden states is accumulated over tiles.
Shape suffixes: N positions, H hidden size, V vocabulary, C the vocabulary of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasuki.algorithms import lm_head_tiles
from tasuki.algorithms.lm_head_tiles import Places, RunningSoftmax, SoftmaxGradient, TileKernels
from tasuki.algorithms.vocabulary_tiles import tile_width


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """One of equal shards of the vocabulary, each on its rank."""

    index: int
    gather: Callable[[Tensor], Tensor]
    """[...] of this rank -> [R, ...] of every rank, in the order of the shards. Collective."""


def token_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    token_ids_N: Tensor,
    *,
    temperature_N: Tensor,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each token under softmax(logits / temperature), and the entropy of that distribution in nats.

    The logits are hidden_NH @ weight_VH.T in float32. hidden_NH, weight_VH: both float32 or both bfloat16; token_ids_N: int64 in
    [0, V); temperature_N: float32, greater than 0. softcap: logits are softcap * tanh(logits / softcap), as in Gemma 2.
    Returns two float32 tensors [N]. Both have gradients with respect to hidden states and weight, in their dtype; an unused entropy costs
    nothing. Backward recomputes the logits except those of the last tile.

    shard: if `weight_VH` has only these rows. Every rank returns the same; its gradient of the hidden states is its part of a sum.
    """
    assert hidden_NH.dtype == weight_VH.dtype, f"hidden states in {hidden_NH.dtype}, weight in {weight_VH.dtype}"
    assert temperature_N.dtype == torch.float32, f"temperatures in {temperature_N.dtype}"
    return _TokenLogProbs.apply(
        hidden_NH, weight_VH, Places(token_ids_N.contiguous(), temperature_N.contiguous(), softcap), shard
    )


class _TokenLogProbs(torch.autograd.Function):
    """Saves two numbers per position for backward, and the buffer with the last tile's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, places: Places, shard: VocabularyShard | None
    ) -> tuple[Tensor, Tensor]:
        kernels, tiles, hidden = _kernels(hidden_NH), _tiles(hidden_NH, weight_VH), _operand(hidden_NH)
        softmax, buffer = RunningSoftmax.empty(places), _buffer(hidden_NH, tiles)
        first = 0 if shard is None else shard.index * len(weight_VH)
        for tile in tiles:
            weight = _operand(weight_VH[tile])
            logits_NC = _product(hidden, weight.T, out=_part(buffer, len(hidden), len(weight)))
            kernels.fold(logits_NC, softmax, places, first_id=first + tile.start)
        if shard is not None and tiles:
            softmax = RunningSoftmax.joined(shard.gather(softmax.values_4N), places.token_ids_N // len(weight_VH))
        entropy_N = softmax.entropy()
        ctx.save_for_backward(hidden_NH, weight_VH, softmax.log_sum(), entropy_N)
        ctx.places, ctx.buffer, ctx.first = places, buffer, first
        ctx.set_materialize_grads(False)
        return softmax.log_probs(), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the name of its first parameter
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_NH, weight_VH, log_sum_N, entropy_N = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None
        softmax = SoftmaxGradient.of(log_sum_N, entropy_N, *grads, places=ctx.places)
        kernels, tiles, hidden = _kernels(hidden_NH), _tiles(hidden_NH, weight_VH), _operand(hidden_NH)
        grad_hidden, grad_weight_VH = _empty_gradients(hidden_NH, weight_VH, tiles, needs=ctx.needs_input_grad)
        # Freed when this returns, not with the graph. A second backward pass allocates a new one.
        kept, ctx.buffer = ctx.buffer, None
        buffer = _buffer(hidden_NH, tiles) if kept is None else kept
        for tile in reversed(tiles):
            weight = _operand(weight_VH[tile])
            logits_NC = _part(buffer, len(hidden), len(weight))
            if kept is None or tile is not tiles[-1]:
                _product(hidden, weight.T, out=logits_NC)
            grad_NC = kernels.gradient(logits_NC, softmax, ctx.places, first_id=ctx.first + tile.start, dtype=hidden.dtype)
            if grad_hidden is not None:
                _add_product(grad_NC, weight, to=grad_hidden)
            if grad_weight_VH is not None:
                _product(grad_NC.T, hidden, out=grad_weight_VH[tile])
            del grad_NC  # its memory is reused by the next tile
        return None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype), grad_weight_VH, None, None


def _kernels(hidden_NH: Tensor) -> TileKernels:
    if hidden_NH.is_cuda:
        from tasuki.algorithms import lm_head_triton

        return lm_head_triton
    return lm_head_tiles


def _tiles(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    """Rows of the weight for each tile; none without positions."""
    (num_places, hidden_size), vocab_size = hidden_NH.shape, weight_VH.shape[0]
    if num_places == 0:
        return []
    width = tile_width(num_places, hidden_size=hidden_size, vocab_size=vocab_size, device=hidden_NH.device.type)
    return [slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)]


def _operand(x: Tensor) -> Tensor:
    """`x` as an operand of products: a CPU gives float32 results only for float32 operands."""
    return x if x.is_cuda else x.float()


def _buffer(hidden_NH: Tensor, tiles: list[slice]) -> Tensor:
    """Buffer large enough for the logits of any tile."""
    width = tiles[0].stop if tiles else 0
    return torch.empty(len(hidden_NH) * width, dtype=torch.float32, device=hidden_NH.device)


def _part(buffer: Tensor, num_rows: int, num_columns: int) -> Tensor:
    return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _empty_gradients(
    hidden_NH: Tensor, weight_VH: Tensor, tiles: list[slice], *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Zeros in float32 for the hidden states; for the weight, memory of which every tile writes its rows."""
    new = torch.empty if tiles else torch.zeros
    return (
        torch.zeros(hidden_NH.shape, dtype=torch.float32, device=hidden_NH.device) if needs[0] else None,
        new(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device) if needs[1] else None,
    )


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Writes a @ b, accumulated in float32 and rounded at most once."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b))


def _add_product(a: Tensor, b: Tensor, *, to: Tensor) -> None:
    """Adds a @ b in float32."""
    if a.dtype == torch.float32:
        to.addmm_(a, b)
    else:
        torch.addmm(to, a, b, out_dtype=torch.float32, out=to)
