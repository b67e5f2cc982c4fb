"""Gated delta nets of an engine on a CPU: SGLang takes our operators, and what they keep between calls continues a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from torch import Tensor

from tasuki.rollout.sglang.cpu import kernels

NUM_TOKENS, HEADS, KEYS = 90, 6, 2
SLOTS = torch.tensor([3, 1])


def inputs() -> dict[str, Tensor]:
    """Two requests of 90 tokens each, one behind the other."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (KEYS, 8), "k": (KEYS, 8), "v": (HEADS, 16), "a": (HEADS,), "b": (HEADS,), "x": (20,)}
    return {name: torch.randn(2, NUM_TOKENS, *shape, generator=generator) for name, shape in shapes.items()}


def test_sglang_takes_them() -> None:
    assert gdn_backend.causal_conv1d_fn is kernels.causal_conv1d_fn_cpu
    assert gdn_backend.causal_conv1d_update is kernels.causal_conv1d_update_cpu
    assert gdn_triton.chunk_gated_delta_rule is kernels.chunk_gated_delta_rule_cpu
    for operator in (gdn_backend.fused_gdn_gating, gdn_triton.fused_sigmoid_gating_delta_rule_update):
        assert str(operator).startswith("sgl_kernel.")


def test_a_product_with_a_gate_is_in_its_place_and_the_result() -> None:
    """SGLang 0.5.23 reads one, 0.5.17 the other."""
    x, gate = inputs()["v"].flatten(2), inputs()["v"].roll(1)
    exact = x * gate.flatten(2).sigmoid()
    operator = torch.ops.sgl_kernel.fused_sigmoid_mul_cpu
    assert torch.equal(operator(x, gate, inplace=True), exact) and torch.equal(x, exact)
    operator(x, gate)
    assert torch.equal(x, exact * gate.flatten(2).sigmoid())


@pytest.mark.parametrize("num_first", [1, 64, 70])
def test_parts_of_a_sequence_continue_the_states_of_their_slots(num_first: int) -> None:
    given, a_log, dt_bias = inputs(), torch.linspace(0, 2, HEADS), torch.linspace(-1, 1, HEADS)
    weight = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))

    def prefill(first: int, end: int, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens `first` to `end` of both requests, packed: outputs of recurrence and convolution, [2, tokens, ...]."""
        packed = {name: each[:, first:end].flatten(0, 1).unsqueeze(0) for name, each in given.items()}
        cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32) * (end - first)
        g, beta = gdn_backend.fused_gdn_gating(a_log, packed["a"][0], packed["b"][0], dt_bias)
        state: dict[str, Any] = {"initial_state": states[0], "initial_state_indices": SLOTS}
        qkv = {name: packed[name] for name in ("q", "k", "v")}
        out, *_ = gdn_triton.chunk_gated_delta_rule(**qkv, g=g, beta=beta, cu_seqlens=cu_seqlens, **state)
        mixed = gdn_backend.causal_conv1d_fn(
            packed["x"][0].T,
            weight,
            None,
            activation="silu",
            conv_states=states[1],
            has_initial_state=torch.tensor([first > 0] * 2),
            cache_indices=SLOTS,
            query_start_loc=cu_seqlens,
        )
        return out[0].unflatten(0, (2, -1)), mixed.T.unflatten(0, (2, -1))

    def decode(at: int, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        one = {name: each[:, at] for name, each in given.items()}
        qkv = {name: one[name].unsqueeze(0) for name in ("q", "k", "v")}
        sources = {"initial_state_source": states[0], "initial_state_indices": SLOTS}
        out = gdn_triton.fused_sigmoid_gating_delta_rule_update(
            A_log=a_log,
            dt_bias=dt_bias,
            **qkv,
            a=one["a"],
            b=one["b"],
            **sources,
            cu_seqlens=torch.arange(3),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        mixed = gdn_backend.causal_conv1d_update(one["x"], states[1], weight, None, "silu", conv_state_indices=SLOTS)
        return out[0].unsqueeze(1), mixed.unsqueeze(1)

    def fresh() -> tuple[Tensor, Tensor]:
        return torch.zeros(5, HEADS, 16, 8), torch.zeros(5, 20, 3)

    once, parted = fresh(), fresh()
    whole = prefill(0, NUM_TOKENS, once)
    parts = [
        prefill(0, num_first, parted),
        prefill(num_first, 80, parted),
        *(decode(at, parted) for at in range(80, NUM_TOKENS)),
    ]
    for index, exact in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim=1), exact, rtol=1e-5, atol=1e-5)
    for one, other in zip(once, parted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert not one[[0, 2, 4]].any(), "slots of no request"
