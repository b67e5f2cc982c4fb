"""Fused norms and MLPs on a GPU: bfloat16 against float32, and the tensors that autograd keeps."""

from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, silu
from transformers import AutoModelForCausalLM

from tasuki.models.known import read_model
from tasuki.planner.kept_bytes import kept_per_token
from tasuki.planner.node import Checkpointing
from tasuki.trainer.modules.pointwise import Activation, RmsNorm, down_projected, fuse_pointwise
from tasuki.trainer.modules.rotary import rotated
from tests.models import CONFIGS
from tests.planned import node_with
from tests.saved_tensors import kept_bytes

pytestmark = pytest.mark.gpu
# Rounding to bfloat16 changes a value by up to 2^-9.
TOLERANCE = 3e-3


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other).norm() / other.norm())


@pytest.mark.parametrize("width", [896, 8960, 18944])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("is_split", [False, True], ids=["two", "halves of one"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["adapted", "plain"])
def test_a_gated_product_is_rounded_once(width: int, activation: Activation, is_split: bool, is_plain: bool) -> None:
    both = torch.randn(1, 1001, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    down = torch.nn.Linear(width, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    exact = both.detach().float().requires_grad_()
    weight = down.weight.detach().float().requires_grad_()
    # Results of operations, as those of projections, so that backward may overwrite them.
    gate, up = (1 * both).chunk(2, dim=-1) if is_split else ((1 * x).contiguous() for x in both.chunk(2, dim=-1))
    out = down_projected(gate, up, down if is_plain else lambda product: down(product), activation)
    exact_gate, exact_up = exact.chunk(2, dim=-1)
    activated = silu(exact_gate) if activation == "silu" else gelu(exact_gate, approximate="tanh")
    expected = (activated * exact_up) @ weight.T
    grad = torch.randn_like(out)
    assert _difference(out, expected) < TOLERANCE
    found, wanted = (
        torch.autograd.grad(out, (both, down.weight), grad),
        torch.autograd.grad(expected, (exact, weight), grad.float()),
    )
    assert all(_difference(one, other) < 2 * TOLERANCE for one, other in zip(found, wanted, strict=True))


def test_backward_of_an_mlp_takes_no_more_than_a_third_matrix() -> None:
    shape, width = (1, 4096, 512), 8192
    gate, up = (torch.randn(*shape[:2], width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    down = torch.nn.Linear(width, shape[-1], bias=False, device="cuda", dtype=torch.bfloat16)
    factors = 1 * gate, 1 * up
    with kept_bytes([down.weight]) as kept:
        out = down_projected(*factors, down, "silu")
    assert sum(kept.values()) == 2 * gate.nbytes
    grad = torch.randn_like(out)
    del factors
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (gate, up, down.weight), grad)
    # The gradient of the product, and the weight's.
    assert torch.cuda.max_memory_allocated() - before < 1.01 * (gate.nbytes + down.weight.nbytes)


@pytest.mark.parametrize("shape", [(1, 1001, 3584), (1, 1001, 28, 128)], ids=["hidden", "heads"])
def test_a_norm_is_rounded_once_and_keeps_no_float32_copy(shape: tuple[int, ...]) -> None:
    weight = torch.nn.Parameter(1 + 0.1 * torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16))
    norm = RmsNorm(weight, 1e-6)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with kept_bytes([weight]) as kept:
        out = norm(x)
    assert sum(kept.values()) < 1.1 * x.nbytes
    exact: Any = x.detach().float().requires_grad_()
    scale = weight.detach().float().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, scale.shape, scale, 1e-6)
    grad = torch.randn_like(out)
    assert _difference(out, expected) < TOLERANCE
    found = torch.autograd.grad(out, (x, weight), grad)
    wanted = torch.autograd.grad(expected, (exact, scale), grad.float())
    assert all(_difference(one, other) < TOLERANCE for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(28, 128), (14, 64), (9, 48)])
def test_a_rotation_is_rounded_once(num_heads: int, head_dim: int) -> None:
    x = torch.randn(1001, num_heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(1001, head_dim // 2, device="cuda").repeat(1, 2)
    cos, sin = (each.to(torch.bfloat16) for each in (angles.cos(), angles.sin()))
    exact: Any = x.detach().float().requires_grad_()
    first, second = exact.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    expected = exact * cos.float().unsqueeze(1) + turned * sin.float().unsqueeze(1)
    out = rotated(x, cos, sin)
    grad = torch.randn_like(out)
    assert _difference(out, expected) < TOLERANCE
    ((one,), (other,)) = torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, exact, grad.float())
    assert _difference(one, other) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "olmo2"])
def test_a_fused_layer_keeps_as_many_bytes_for_backward_as_planned(kind: str) -> None:
    num_tokens, config = 256, CONFIGS[kind]()
    config.attn_logit_softcapping = None
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fuse_pointwise(model)
    layer = model.model.layers[1]
    hidden = torch.randn(1, num_tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(num_tokens, device="cuda")[None])
    flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    with flash, kept_bytes([*layer.parameters(), *rotary]) as kept:
        layer(hidden, attention_mask=None, position_embeddings=rotary)
    shape = read_model({**config.to_dict(), "architectures": [type(model).__name__]}).shape
    # torch's attention may repeat key heads, and Gemma's norms keep their weights plus one.
    predicted = num_tokens * kept_per_token(
        node_with(shape, micro_batch_tokens=num_tokens, checkpointing=Checkpointing.FULL), 1
    )
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.1)
