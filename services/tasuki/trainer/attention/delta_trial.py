"""Trial of the gated delta rule's kernels on the target device."""

import functools
import logging
import time

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tasuki.models.shape import DeltaNet
from tasuki.trainer.attention.delta import DeltaKernel, DeltaSequences, FlaDelta, PlainDelta
from tasuki.wire.errors import UnsupportedModel

_log = logging.getLogger("tasuki.trainer")
# In bfloat16 output and gradients differ from float32's by less than 0.005 in norm.
_TOLERANCE = 0.02
# Lengths of the trial sequences: around chunks of 64 tokens, and a single token.
_LENGTHS = (1, 63, 65, 64, 200)


@functools.cache
def choose_delta(delta: DeltaNet, *, dtype: torch.dtype, device: torch.device) -> DeltaKernel:
    """Plain torch on a CPU. On a GPU flash-linear-attention's kernels, once they are correct in a trial, which compiles them.

    Raises UnsupportedModel if they are missing or wrong: plain torch would take many times as long as the rest of a step.
    """
    if device.type == "cpu":
        return PlainDelta
    started = time.monotonic()
    fault = fault_of(FlaDelta, delta, dtype=dtype, device=device)
    if fault is not None:
        problem = f"gated delta nets need tilelang and flash-linear-attention 0.6, which pip installs; here they fail: {fault}"
        raise UnsupportedModel(f"model.path: {problem}", field="model.path")
    _log.info("event=delta_net kernels=fla seconds=%.1f", time.monotonic() - started)
    return FlaDelta


def fault_of(kernel: DeltaKernel, delta: DeltaNet, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Errors of outputs and gradients, compared with plain torch in float32. None if they are small."""
    generator = torch.Generator(device).manual_seed(0)
    heads, key_size, value_size = delta.num_value_heads, delta.key_head_dim, delta.value_head_dim
    widths = ((heads, key_size), (heads, key_size), (heads, value_size), (heads,), (heads,), (heads, value_size))
    q, k, v, decay, beta, grad = (torch.randn(sum(_LENGTHS), *width, generator=generator, device=device) for width in widths)
    recurrence = [q.to(dtype), k.to(dtype), v.to(dtype), -softplus(decay) * 0.3, beta.sigmoid().to(dtype)]
    x_TC = torch.randn(sum(_LENGTHS), delta.conv_size, generator=generator, device=device).to(dtype)
    weight_CW = torch.randn(delta.conv_size, delta.kernel_size, generator=generator, device=device).to(dtype)
    cu_seqlens_S = torch.tensor([0, *_LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    inputs = [*recurrence, x_TC, weight_CW]
    grads = [grad.to(dtype), torch.randn(x_TC.shape, generator=generator, device=device).to(dtype)]
    try:
        found = _with_gradients(kernel(cu_seqlens_S), inputs, grads)
    except Exception as error:  # noqa: BLE001  a compiler's, a driver's or an import's, whatever it is: the kernels are not usable
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    exact = _with_gradients(PlainDelta(cu_seqlens_S), [x.float() for x in inputs], [x.float() for x in grads])
    for name, one, other in zip(
        ("recurrence", "convolution", "dq", "dk", "dv", "dg", "dbeta", "dx", "dw"), found, exact, strict=True
    ):
        difference = float((one.float() - other).norm() / other.norm())
        if not difference < _TOLERANCE:
            return f"{name} is off by {difference:.3f} in norm"
    return None


def _with_gradients(sequences: DeltaSequences, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs of recurrence and convolution, and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, decay_TH, beta_TH, x_TC, weight_CW = leaves
    outs = [sequences.recur(q, k, v, decay_TH=decay_TH, beta_TH=beta_TH), sequences.convolve(x_TC, weight_CW)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]
