"""The GPU's kernels of gated MLPs against plain torch, run by Triton's interpreter on a CPU."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import gelu, silu

from tasuki.trainer.modules import triton_kernels as kernels
from tasuki.trainer.modules.pointwise import Activation, down_projected, halves
from tasuki.trainer.modules.recompute import recomputing
from tests.operators import CountedOperators
from tests.saved_tensors import kept_bytes


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


class Projections(torch.nn.Module):
    """Gate and up, in one or in two, and down, as in a layer that is recomputed."""

    def __init__(self, activation: Activation, *, is_split: bool) -> None:
        super().__init__()
        self.firsts = torch.nn.ModuleList(torch.nn.Linear(16, 80 // num, bias=False) for num in [1 + is_split] * (1 + is_split))
        self.down, self.activation = torch.nn.Linear(40, 16, bias=False), activation

    def factors(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        results = [first(x) for first in self.firsts]
        return results if len(results) > 1 else halves(results[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.factors(x)
        return down_projected(gate, up, self.down, self.activation)


@pytest.mark.parametrize("is_split", [False, True], ids=["halves of one", "two"])
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_an_mlp_keeps_its_factors_and_computes_its_products_once(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, is_recomputed: bool, is_split: bool
) -> None:
    torch.manual_seed(0)
    mlp = Projections(activation, is_split=is_split)
    x = torch.randn(1, 7, 16, requires_grad=True)
    gate, up = mlp.factors(x)
    plain = mlp.down((silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up)
    grad = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, (x, *mlp.parameters()), grad)
    # Tensors that say they are on a GPU take the path of a GPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    forward = recomputing(mlp) if is_recomputed else lambda function, x: function(x)
    with kept_bytes(mlp.parameters()) as kept, CountedOperators() as counted:
        out = forward(mlp, x)
    assert sum(kept.values()) == x.nbytes + (0 if is_recomputed else 2 * 7 * 40 * 4)
    num_products = 3 if is_split else 2
    assert counted.runs[torch.ops.aten.mm.default] == num_products
    with CountedOperators() as counted:
        found = torch.autograd.grad(out, (x, *mlp.parameters()), grad)
    # Two for each projection, and gate and up once more; the product is never projected again, and no gradients are joined.
    assert counted.runs[torch.ops.aten.mm.default] == 2 * num_products + (num_products - 1) * is_recomputed
    assert not counted.runs[torch.ops.aten.cat.default]
    torch.testing.assert_close(out, plain)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
