"""Latent attention (MLA) of DeepSeek's form whose projections follow a sync.

SGLang copies `kv_b_proj` to `w_kc` and `w_vc` when weights are loaded, which later weights would not reach. Here both are views of the
parameter: they take no memory, and every sync reaches them (models/deepseek_common/deepseek_weight_loader.py).
"""

from typing import Any

from tasuki.rollout.sglang.cpu.attention import install_cpu_latent_attention


def install_latent_attention(*, device: str | None) -> None:
    """Makes models of this process read `kv_b_proj` in every pass, in CUDA graphs too."""
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    loader: Any = deepseek_weight_loader
    loader.DeepseekV2WeightLoaderMixin.post_load_weights = _view_projections
    # The recorder sees nothing of what other threads write.
    loader.should_async_load = lambda _: False
    if device == "cpu":
        install_cpu_latent_attention()


def _view_projections(causal_lm: Any, is_nextn: bool = False, weight_names: object = None) -> None:
    """Called after loading. w_kc: [heads, D, R] of keys without rotation; w_vc: [heads, R, D] of values."""
    assert not is_nextn, "layers for drafts are not loaded"
    for layer in causal_lm.model.layers:
        attention = layer.self_attn
        sizes = attention.qk_nope_head_dim, attention.v_head_dim
        rows = attention.kv_b_proj.weight.data.unflatten(0, (-1, sum(sizes)))
        attention.w_kc, values = rows.split(sizes, dim=1)
        attention.w_vc = values.transpose(1, 2)
        # SGLang does so in the first pass; a module that comes later would make the copy plan void.
        attention.attn_mha.kv_b_proj = attention.kv_b_proj
