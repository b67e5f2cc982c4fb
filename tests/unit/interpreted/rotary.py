"""The GPU's kernel of rotary position embeddings against plain torch, run by Triton's interpreter on a CPU."""

import pytest
import torch

from tasuki.trainer.modules.rotary import rotated
from tasuki.trainer.modules.triton_kernels import rotate


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (9, 48), (16, 64)])
def test_the_kernel_and_its_gradient_are_those_of_plain_torch(num_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(11, num_heads, head_dim, generator=generator) for _ in range(2))
    angles = torch.randn(11, head_dim // 2, generator=generator).repeat(1, 2)
    leaf = x.clone().requires_grad_()
    expected = rotated(leaf, angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin(), is_back=False), expected.detach())
    (gradient,) = torch.autograd.grad(expected, leaf, grad)
    torch.testing.assert_close(rotate(grad, angles.cos(), angles.sin(), is_back=True), gradient)
