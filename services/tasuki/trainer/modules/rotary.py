"""A layer's attention with fused rotation, which replaces transformers' module and uses packed attention's layout.

Transformers rotates tensors with heads before tokens, in a chain of operations over whole activations; packed attention then copies
them back to token order. On an H200 this takes a tenth of a step. Keys and values are computed in one product.

Shape suffixes: T tokens, H heads, K key heads, D head size.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Their attention consists of projections, optional head norms, and a rotation of whole heads by halves.
_ROTATED = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
    "Qwen3VLTextAttention",
)


class RotaryAttention(nn.Module):
    """Replaces a model's `self_attn`. Parameters keep their names and order."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        for name, module in attention.named_children():
            self.add_module(name, module)
        given: Any = attention
        self.layer_idx: int = given.layer_idx
        self.head_dim: int = given.head_dim

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        layer_attention: Callable[..., Tensor],
        **_: object,
    ) -> tuple[Tensor, None]:
        """Called by a layer. hidden_states: [1, T, H * D]; position_embeddings: cosines and sines, [1, T, D]."""
        cos_TD, sin_TD = (each.squeeze(0) for each in position_embeddings)
        keys, values = self._keys_and_values(hidden_states)
        q_THD = rotated(self._heads("q", self._run("q_proj", hidden_states)), cos_TD, sin_TD)
        k_TKD = rotated(self._heads("k", keys), cos_TD, sin_TD)
        out_THD = _attend(layer_attention, q_THD, k_TKD, self._heads("v", values), layer=self.layer_idx)
        return self._run("o_proj", out_THD.flatten(1).unsqueeze(0)), None

    def _keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, K * D] each, from one product unless adapters prevent it: alone each is too narrow to fill a GPU."""
        of_keys, of_values = self.get_submodule("k_proj"), self.get_submodule("v_proj")
        if type(of_keys) is not nn.Linear or type(of_values) is not nn.Linear:
            return of_keys(hidden_states), of_values(hidden_states)
        bias = None if of_keys.bias is None else torch.cat((of_keys.bias, of_values.bias))
        both = linear(hidden_states, torch.cat((of_keys.weight, of_values.weight)), bias)
        keys, values = both.chunk(2, dim=-1)
        # A view would keep both for backward; for keys only the rotated tensor is kept.
        return keys, values.contiguous()

    def _heads(self, name: str, projected: Tensor) -> Tensor:
        heads_THD = projected.view(projected.shape[1], -1, self.head_dim)
        return self._run(f"{name}_norm", heads_THD) if f"{name}_norm" in self._modules else heads_THD

    def _run(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x)


def _contiguous(layer_attention: Callable[..., Tensor], *qkv: Tensor, layer: int) -> Tensor:
    """[T, H, D]."""
    return layer_attention(*qkv, layer=layer).contiguous()


# Runs between the two graphs of a compiled layer; see attention.py.
_attend = cast(Callable[..., Tensor], torch.compiler.disable(_contiguous))


def fuse_rotation(causal_lm: nn.Module) -> None:
    """Replaces attention modules of this form."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        if type(getattr(layer, "self_attn", None)).__name__ in _ROTATED:
            layer.self_attn = RotaryAttention(layer.self_attn)


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """[T, H, D] contiguous: rotates each head by its token's angles, pairing its halves. Differentiable in x only.

    On a GPU one kernel, ours unless the layer is compiled, in float32 until it is rounded.
    """
    if x_THD.is_cuda and not torch.compiler.is_compiling():
        return _Rotated.apply(x_THD, cos_TD, sin_TD)
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin_TD.unsqueeze(1)


class _Rotated(torch.autograd.Function):
    """Backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        from tasuki.trainer.modules.triton_kernels import rotate

        ctx.save_for_backward(cos_TD, sin_TD)
        return rotate(x_THD.contiguous(), cos_TD, sin_TD, is_back=False)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from tasuki.trainer.modules.triton_kernels import rotate

        cos_TD, sin_TD = ctx.saved_tensors
        return rotate(grad_THD.contiguous(), cos_TD, sin_TD, is_back=True), None, None
