"""FlashAttention-4 and torch's varlen_attn over packed sequences, against float32 on the same GPU."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tasuki.models.family import full_attention
from tasuki.planner.presets import MODELS
from tasuki.trainer.attention.packed import AttentionBackend, Sequences, sequences_of
from tasuki.trainer.attention.trial import choose_kernel
from tasuki.wire.errors import InvalidArgument
from tests.refusal import refusing
from tests.unit.test_packed_attention import pack

LENGTHS = (1, 127, 128, 129, 1000, 4097)
# Query heads, key heads, head size, window: Qwen2.5 7B and 0.5B, Qwen3 8B, Mistral's window, Gemma 3.
SHAPES = [(28, 4, 128, None), (14, 2, 64, None), (32, 8, 128, None), (32, 8, 128, 100), (4, 1, 256, 512)]
SHAPE = MODELS["qwen2.5-0.5b"]

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["fa4", "varlen", "sdpa"])
def name(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "fa4":
        pytest.importorskip("flash_attn.cute")
    return request.param


def inputs(num_heads: int, num_keys: int, head_dim: int) -> list[Tensor]:
    """Makes q, k, v and the gradient of the output, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(1)
    heads = (num_heads, num_keys, num_keys, num_heads)
    return [
        torch.randn(sum(LENGTHS), num, head_dim, generator=generator, device="cuda").bfloat16().requires_grad_()
        for num in heads
    ]


def sequences(name: AttentionBackend) -> Sequences:
    return sequences_of(
        name, replace(pack(LENGTHS), cu_seqlens_S=torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32))
    )


def run(name: AttentionBackend, tensors: list[Tensor], window: int | None) -> list[Tensor]:
    """Returns output, dq, dk and dv."""
    *qkv, grad = tensors
    out = sequences(name).attend(*qkv, scale=0.07, window=window, softcap=None)
    return [out, *torch.autograd.grad(out, qkv, grad)]


def off(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other).norm() / other.norm())


@pytest.mark.parametrize(("num_heads", "num_keys", "head_dim", "window"), SHAPES)
def test_a_kernel_and_its_gradients_are_near_float32(
    name: AttentionBackend, num_heads: int, num_keys: int, head_dim: int, window: int | None
) -> None:
    tensors = inputs(num_heads, num_keys, head_dim)
    found = run(name, tensors, window)
    exact = run("sdpa", [x.detach().float().requires_grad_() for x in tensors], window)
    errors = {each: off(one, other) for each, one, other in zip(("out", "dq", "dk", "dv"), found, exact, strict=True)}
    assert max(errors.values()) < 0.01, errors


def test_a_sequence_changes_nothing_in_its_neighbours(name: AttentionBackend) -> None:
    tensors = [x.detach() for x in inputs(14, 2, 64)]
    changed = [x.clone() for x in tensors]
    first, last = LENGTHS[0] + LENGTHS[1], LENGTHS[0] + LENGTHS[1] + LENGTHS[2]
    for x in changed[:3]:
        x[first:last] = 3.0
    one, other = (sequences(name).attend(*x[:3], scale=0.1, window=None, softcap=None) for x in (tensors, changed))
    assert torch.equal(one[:first], other[:first])
    assert torch.equal(one[last:], other[last:])
    assert not torch.allclose(one[first:last], other[first:last])


def test_auto_takes_the_first_kernel_that_is_right(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("flash_attn.cute")
    settings = {"shape": SHAPE, "device": torch.device("cuda", 0)}
    full = full_attention(SHAPE)
    assert choose_kernel("auto", attention=full, dtype=torch.bfloat16, **settings) == "fa4"
    capped = replace(full, logit_softcap=50.0)
    with caplog.at_level(logging.INFO, "tasuki.trainer"):
        assert choose_kernel("auto", attention=capped, dtype=torch.bfloat16, **settings) == "sdpa"
        assert choose_kernel("auto", attention=full, dtype=torch.float32, **settings) == "sdpa"
    assert "backend=sdpa" in caplog.text
    assert "cannot cap logits" in caplog.text
    for attention, dtype, named in ((capped, torch.bfloat16, "50"), (full, torch.float32, "compute_dtype")):
        with refusing("trainer.attention_backend", match=named):
            choose_kernel("fa4", attention=attention, dtype=dtype, **settings)
    with pytest.raises(InvalidArgument, match="head_dim"):
        choose_kernel(
            "varlen", attention=full, dtype=torch.bfloat16, shape=replace(SHAPE, head_dim=20), device=settings["device"]
        )
