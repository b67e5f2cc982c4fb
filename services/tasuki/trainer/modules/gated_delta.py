"""A layer's gated delta net over packed sequences, which replaces transformers' module.

Shape suffixes: T tokens, C channels, H value heads, G key heads, K and V sizes of keys and values.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from tasuki.trainer.attention.packed import LayerAttention

_REPLACED = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")


class GatedDeltaNet(nn.Module):
    """Replaces a model's `linear_attn`. Parameters keep their names and order."""

    def __init__(self, delta: nn.Module) -> None:
        super().__init__()
        given: Any = delta
        for name, parameter in delta.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, module in delta.named_children():
            if name == "norm":
                self.norm = _GatedNorm(given.norm.weight, given.layer_norm_epsilon, device=given.out_proj.weight.device)
            elif name != "act":
                self.add_module(name, module)
        self._key_heads: int = given.num_k_heads
        self._value_heads: int = given.num_v_heads
        self._key_size: int = given.key_dim
        self._value_size: int = given.value_dim

    def forward(self, hidden_states: Tensor, *, layer_attention: LayerAttention, **_: object) -> Tensor:
        """Called by a layer. hidden_states: [1, T, H * V]."""
        qkv_TC, z_THV, b_TH, a_TH = self._projected(hidden_states.squeeze(0))
        out_THV = _mix(self, qkv_TC, b_TH, a_TH, layer_attention)
        gated = self.norm(out_THV, z_THV).flatten(1)
        return self.get_submodule("out_proj")(gated).unsqueeze(0)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not hasattr(self, "in_proj_qkvz"):
            qkv, z, b, a = (self.get_submodule(f"in_proj_{name}")(hidden) for name in ("qkv", "z", "b", "a"))
            return qkv, z.unflatten(-1, (self._value_heads, -1)), b, a
        # All that belongs to a key head is together.
        fused = (self.get_submodule(f"in_proj_{name}")(hidden) for name in ("qkvz", "ba"))
        qkvz, ba = (x.unflatten(-1, (self._key_heads, -1)) for x in fused)
        key, value = self._key_size // self._key_heads, self._value_size // self._key_heads
        *qkv, z = qkvz.split((key, key, value, value), dim=-1)
        b, a = (x.flatten(1) for x in ba.chunk(2, dim=-1))
        return torch.cat([x.flatten(1) for x in qkv], dim=-1), z.reshape(len(hidden), self._value_heads, -1), b, a

    def mix(self, qkv_TC: Tensor, b_TH: Tensor, a_TH: Tensor, layer_attention: LayerAttention) -> Tensor:
        """[T, H, V]."""
        sequences = layer_attention.delta
        assert sequences is not None, "check_model refuses what has no sequences of its own"
        mixed_TC = sequences.convolve(qkv_TC, cast(Tensor, self.get_submodule("conv1d").weight).squeeze(1))
        q_TC, k_TC, v_TC = mixed_TC.split((self._key_size, self._key_size, self._value_size), dim=-1)
        repeats = self._value_heads // self._key_heads
        q_THK, k_THK = (x.unflatten(-1, (self._key_heads, -1)).repeat_interleave(repeats, dim=1) for x in (q_TC, k_TC))
        a_log, dt_bias = cast(Tensor, self.A_log), cast(Tensor, self.dt_bias)
        decay_TH = -a_log.float().exp() * softplus(a_TH.float() + dt_bias.float())
        v_THV = v_TC.unflatten(-1, (self._value_heads, -1))
        return sequences.recur(q_THK, k_THK, v_THV, decay_TH=decay_TH, beta_TH=b_TH.sigmoid())


class _GatedNorm(nn.Module):
    """RMSNorm, then scaled by the gate's SiLU; in float32 until it is rounded, as in the engine."""

    def __init__(self, weight: nn.Parameter, eps: float, *, device: torch.device) -> None:
        """device: of the model. With flash-linear-attention transformers creates this weight on the GPU, whatever the model's device."""
        super().__init__()
        self.weight = weight if weight.device == device else nn.Parameter(torch.empty_like(weight, device=device))
        self._eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self._eps) * self.weight.float()
        return (scaled * silu(gate.float())).to(x.dtype)


def _contiguous(net: GatedDeltaNet, *inputs: Any) -> Tensor:
    return net.mix(*inputs).contiguous()


# Runs between the two graphs of a compiled layer, since it depends on the sequences' lengths.
_mix = cast(Callable[..., Tensor], torch.compiler.disable(_contiguous))


def replace_delta_nets(causal_lm: nn.Module) -> None:
    """Replaces the gated delta nets, whose modules in transformers carry a sequence's state over to the next one packed behind it."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        if type(getattr(layer, "linear_attn", None)).__name__ in _REPLACED:
            layer.linear_attn = GatedDeltaNet(layer.linear_attn)
