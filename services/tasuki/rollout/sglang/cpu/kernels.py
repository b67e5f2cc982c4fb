"""`sgl_kernel` and `sgl_kernel.mamba` of an engine on a CPU, and its operators, most of them of gated delta nets.

SGLang imports functions of that package's build for CPUs with AMX. The build for CUDA has none of them, and without a driver it cannot be
imported. This module takes its place: a function that an engine of ours calls has a body in torch, and any other raises once it is called.

Names and order of arguments are SGLang's. A state is [value heads, V, K] there, and [value heads, K, V] in transformers' functions, which
compute here.

Shape suffixes: T new tokens of all requests, B requests with one token each, G key heads, H value heads, K and V their sizes, C channels.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import torch
from sglang.srt.utils import is_cpu
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def causal_conv1d_fn_cpu(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: object,
) -> Tensor:
    """[C, T]: SiLU of the causal convolution of each request's new tokens. conv_states: [slots, C, W - 1], its latest inputs; updated."""
    assert bias is None and activation in ("silu", "swish"), "gated delta nets have no other"
    outs, width = list[Tensor](), conv_states.shape[-1]
    for index, (first, end) in enumerate(pairwise(query_start_loc.tolist())):
        state = conv_states[cache_indices[index]]
        before = state if has_initial_state[index] else torch.zeros_like(state)
        joined = torch.cat((before.to(x_CT.dtype), x_CT[:, first:end]), dim=-1)
        outs.append(conv1d(joined.unsqueeze(0), weight_CW.unsqueeze(1), groups=len(weight_CW)).squeeze(0))
        conv_states[cache_indices[index]] = joined[:, -width:].to(conv_states.dtype)
    return silu(torch.cat(outs, dim=-1))


def causal_conv1d_update_cpu(
    x_BC: Tensor, conv_states: Tensor, weight_CW: Tensor, bias: None, activation: str, *, conv_state_indices: Tensor
) -> Tensor:
    """[B, C]: the same for one token of each request."""
    assert bias is None and activation in ("silu", "swish"), "gated delta nets have no other"
    joined = torch.cat((conv_states[conv_state_indices].to(x_BC.dtype), x_BC.unsqueeze(-1)), dim=-1)
    conv_states[conv_state_indices] = joined[:, :, 1:].to(conv_states.dtype)
    return silu(conv1d(joined, weight_CW.unsqueeze(1), groups=len(weight_CW)).squeeze(-1))


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> tuple[Tensor, None, None]:
    """[1, T, H, V] of each request's new tokens; q, k: [1, T, G, K]. initial_state: of all slots; updated."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    out = torch.empty_like(v)
    for index, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slots, new = initial_state_indices[index : index + 1], slice(first, end)
        out[:, new] = _recurred(
            torch_chunk_gated_delta_rule, *(x[:, new] for x in (q, k, v, g, beta)), states=initial_state, slots=slots
        )
    return out, None, None


def _update(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """[1, B, H, V]; q, k: [1, B, G, K]. initial_state_source: of all slots; updated."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    g, beta = _gating(A_log, a, b, dt_bias)
    by_request = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    out = _recurred(torch_recurrent_gated_delta_rule, *by_request, states=initial_state_source, slots=initial_state_indices)
    return out.transpose(0, 1)


def _recurred(
    rule: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    repeats = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(repeats, dim=2), k.repeat_interleave(repeats, dim=2)
    state = states[slots].transpose(-1, -2).float()
    out, last = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    states[slots] = last.transpose(-1, -2).to(states.dtype)
    return out


def _gating(A_log: Tensor, a_TH: Tensor, b_TH: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of what a state keeps, and the strength of what is written to it; [1, T, H] float32, and in the inputs' dtype."""
    decay_TH = -A_log.float().exp() * softplus(a_TH.float() + dt_bias.float())
    return decay_TH.unsqueeze(0), b_TH.sigmoid().unsqueeze(0)


def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return (_normed(x, eps) * weight.float() * silu(gate.float())).to(x.dtype)


def _split_inputs(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution [T, C], gates [T, H, V], and two numbers [T, H] of each head."""
    gates = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + gates, gates], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_dim), b.contiguous(), a.contiguous()


def _head_norms(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Norms that add 1 to their weights; [tokens times heads, head_dim]."""
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return tuple((_normed(x, eps) * (1 + weight.float())).to(x.dtype) for x, weight in ((q, q_weight), (k, k_weight)))  # pyright: ignore[reportReturnType]


def _gated_head_norms(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for queries that are projected with their gates, head by head; also the gates."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, -1).chunk(2, dim=-1)
    return *_head_norms(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def _normed(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _sigmoid_mul(x: Tensor, gate: Tensor, inplace: bool = True) -> Tensor:
    """In place: SGLang 0.5.23 reads x after it, 0.5.17 the result."""
    assert inplace, "SGLang asks for nothing else"
    return x.mul_(gate.reshape(x.shape).sigmoid())


_OPERATORS: dict[str, Callable[..., Any]] = {
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": _gating,
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
    "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, "
    "float softplus_beta, float softplus_threshold) -> Tensor": _update,
    "fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor": _gated_norm,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int key_heads, int value_heads, int key_dim, int value_dim)"
    " -> (Tensor, Tensor, Tensor, Tensor)": _split_inputs,
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)": (
        _head_norms
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, "
    "int num_heads) -> (Tensor, Tensor, Tensor)": _gated_head_norms,
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate, bool inplace=True) -> Tensor(a!)": _sigmoid_mul,
}
_library: list[torch.library.Library] = []


def install_cpu_kernels() -> None:
    """Makes this module `sgl_kernel`, unless the installed one has functions for CPUs. Call it before SGLang's engine is imported."""
    if not is_cpu():
        return
    try:
        import sgl_kernel as installed
    except ImportError:  # needs a CUDA driver
        installed = None
    if hasattr(installed, assign_req_to_token_pool_cpu.__name__):
        return
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.mamba"] = sys.modules[__name__]
    _library.append(library := torch.library.Library("sgl_kernel", "FRAGMENT"))
    for schema, body in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], body, "CompositeExplicitAutograd")


def _add_gated(hidden_TH: Tensor, gate_H: Tensor, shared_TH: Tensor, out_TH: Tensor) -> None:
    """Adds the shared expert's result, scaled by a sigmoid of the token."""
    out_TH.add_((hidden_TH @ gate_H).sigmoid().unsqueeze(1) * shared_TH)


def install_delta_nets() -> None:
    """Makes SGLang's gated norms take these operators, as it does with AMX, and replaces a Triton kernel. Before the model is built.

    Qwen3-Next asks torch for its device, and from 2.14 on torch names CUDA's even without a driver.
    """
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.models import qwen2_moe

    layernorm_gated._use_cpu = fused_norm_gate._use_cpu = True  # the latter in Qwen3-Next
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated
    by_device = torch.get_device_module
    torch.get_device_module = lambda device="cpu": by_device(device)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Notes the cache slots of each request's new tokens. out_cache_loc: [new tokens of all requests], in order."""
    first = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[first : first + end - start]
        first += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function that SGLang imports with its engine, and that no engine of ours calls, such as those of drafts."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} has no body for CPUs in {__name__}, and no engine of tasuki should call it")

    return missing
