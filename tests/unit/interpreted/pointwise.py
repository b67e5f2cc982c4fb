"""The GPU's kernels of gated MLPs against plain torch, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from tasuki.trainer.backends.fsdp import pointwise_triton as kernels
from tasuki.trainer.backends.fsdp.pointwise import Activation


@pytest.mark.parametrize("is_split", [False, True], ids=["two", "halves of one"])
@pytest.mark.parametrize("with_product", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_kernel_and_its_gradients_are_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, with_product: bool, is_split: bool
) -> None:
    monkeypatch.setattr(kernels, "_COLUMNS", 32)
    generator = torch.Generator().manual_seed(0)
    both = 4 * torch.randn(1, 7, 2 * 75, generator=generator)
    both[0, 0, 0], both[0, 0, 1] = 80.0, -80.0
    gate, up = both.chunk(2, dim=-1) if is_split else (x.contiguous() for x in both.chunk(2, dim=-1))
    leaves = [x.detach().clone().requires_grad_() for x in (gate, up)]
    expected = (silu(leaves[0]) if activation == "silu" else gelu(leaves[0], approximate="tanh")) * leaves[1]
    grad = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(kernels.gated_forward(gate, up, activation), expected.detach())
    wanted = torch.autograd.grad(expected, leaves, grad)
    held = grad.clone()
    kernels.gated_backward(held, gate, up, activation, with_product=with_product)
    torch.testing.assert_close(held, expected.detach() if with_product else grad)
    for one, other in zip((gate, up), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
