"""Norms and gated MLPs with fused pointwise operations, which replace transformers' chains of operations.

Each operation of such a chain reads and writes whole activations. On a GPU a chain takes about as long as the matrix products.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, silu

Activation = Literal["silu", "gelu_pytorch_tanh"]
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh")


class RmsNorm(nn.Module):
    """torch's fused RMSNorm: sums and scales in float32, and rounds once."""

    def __init__(self, weight: nn.Parameter | None, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), with separate or fused gate and up projections, named as in the model."""

    def __init__(self, mlp: nn.Module, activation: Activation) -> None:
        super().__init__()
        self._activation: Activation = activation
        self.keeps_product = False
        """Whether activation(gate) * up is kept for backward even where it can be recomputed."""
        for name, projection in mlp.named_children():
            if name.endswith("_proj"):
                self.add_module(name, projection)

    def forward(self, x: Tensor) -> Tensor:
        projections = cast(Mapping[str, Callable[[Tensor], Tensor]], self._modules)
        fused = projections.get("gate_up_proj")
        gate, up = (projections["gate_proj"](x), projections["up_proj"](x)) if fused is None else halves(fused(x))
        return down_projected(gate, up, projections["down_proj"], self._activation, keeps_product=self.keeps_product)


class ClampedGate(torch.autograd.Function):
    """gpt-oss's activation of gates and ups, [.., 2 I] interleaved -> [.., I].

    Keeps its input alone, where transformers' operations would also keep 4 I.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        share = torch.sigmoid(gate * alpha)
        grads = torch.empty_like(gate_up)
        grads[..., ::2] = grad * (up + 1) * share * (1 + alpha * gate * (1 - share)) * (gate_up[..., ::2] <= limit)
        grads[..., 1::2] = grad * gate * share * (gate_up[..., 1::2].abs() <= limit)
        return grads, None, None


def clamped_gate(experts: Any) -> Callable[[Tensor], Tensor]:
    """The activation of transformers' GptOssExperts."""
    alpha, limit = experts.alpha, experts.limit
    return lambda gate_up: ClampedGate.apply(gate_up, alpha, limit)


def fuse_pointwise(causal_lm: nn.Module) -> None:
    """Replaces the text's norms and MLPs that have a fused form. Parameters keep their names and order."""
    for parent in list(causal_lm.get_submodule("model").modules()):
        for name, module in list(parent.named_children()):
            fused = _fused(module)
            if fused is not None:
                setattr(parent, name, fused)


def halves(both: Tensor) -> Sequence[Tensor]:
    """[..., 2 I] -> gate and up, [..., I]. If backward writes their gradients in their place, it does not copy these to join them."""
    return both.chunk(2, dim=-1) if torch.compiler.is_compiling() else _Halves.apply(both)


def down_projected(
    gate: Tensor,
    up: Tensor,
    down: Callable[[Tensor], Tensor] | nn.Linear | Tensor,
    activation: Activation,
    *,
    keeps_product: bool = False,
) -> Tensor:
    """down(activation(gate) * up). gate, up: results of projections, in one dtype. down: a projection, or its weight [H, I].

    On a GPU, unless compiled, activation and product are one kernel, which computes in float32. Backward writes the gradients of gate and
    up in their place, and recomputes the product unless it is kept; `down` must be a plain projection for that.
    """
    if isinstance(down, nn.Linear) and down.bias is None:
        down = down.weight
    project = partial(linear, weight=down) if isinstance(down, Tensor) else down
    if not gate.is_cuda or torch.compiler.is_compiling():
        return project((silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up)
    if isinstance(down, Tensor) and not keeps_product:
        held = _Held.apply(gate, up, down, activation)
        return _DownProjected.apply(held, gate.detach(), up.detach(), down.detach(), activation)
    return project(_Gated.apply(gate, up, activation))


def _fused(module: nn.Module) -> nn.Module | None:
    # Norms of Gemma 2 and 3 add 1 to their weight in float32, and name epsilon as those of Gemma 4 do.
    norm: Any = module
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return RmsNorm(norm.weight, norm.variance_epsilon)
    if type(module).__name__ == "Gemma4RMSNorm":
        return RmsNorm(norm.weight if norm.with_scale else None, norm.eps)
    if type(module).__name__.endswith("MLP") and hasattr(module, "down_proj") and not hasattr(module, "experts"):
        config: Any = module.config
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        return GatedMlp(module, activation) if activation in _ACTIVATIONS else None
    return None


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> tuple[Tensor, ...]:
        return both.chunk(2, dim=-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        width, gap = first.shape[-1], (second.data_ptr() - first.data_ptr()) // first.element_size()
        if first.stride() == second.stride() and (*first.stride()[-2:], gap) == (2 * width, 1, width):
            return first.as_strided((*first.shape[:-1], 2 * width), first.stride())
        return torch.cat((first, second), dim=-1)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        from tasuki.trainer.modules.triton_kernels import gated_forward

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from tasuki.trainer.modules.triton_kernels import gated_backward

        gate, up = ctx.saved_tensors
        gated_backward(grad.contiguous(), gate, up, ctx.activation)
        return gate, up, None


class _Held(torch.autograd.Function):
    """Keeps what backward of the projected product needs. A separate node, so that recomputation ends before the product.

    Its result has the shape of the projected product and no memory.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return gate.new_empty(()).expand(*gate.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from tasuki.trainer.modules.triton_kernels import gated_backward

        gate, up, weight = ctx.saved_tensors
        product = grad @ weight
        is_trained = ctx.needs_input_grad[2]
        gated_backward(product, gate, up, ctx.activation, with_product=is_trained)
        return gate, up, grad.flatten(0, -2).T @ product.flatten(0, -2) if is_trained else None, None


class _DownProjected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, gate: Tensor, up: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        from tasuki.trainer.modules.triton_kernels import gated_forward

        return linear(gated_forward(gate, up, activation), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None, None, None, None
