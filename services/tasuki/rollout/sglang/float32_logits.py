"""Float32 logits from bfloat16 weights.

SGLang rounds logits to bfloat16, whose steps at 20 are 0.125. Its enable_fp32_lm_head converts the whole weight for every token.
A GPU's matrix product accumulates in float32 anyway, so it suffices to skip the rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import logits_processor
from torch import Tensor

_Projection = Callable[[Any, Tensor, Any, Tensor | None], Tensor]


def install_float32_logits() -> None:
    """Makes every LogitsProcessor of this process project in float32 if the weight allows it.

    With tensor parallelism each rank projects onto its part of the vocabulary, and float32 logits are gathered. Works in CUDA graphs.
    """
    processor: Any = logits_processor.LogitsProcessor
    processor._compute_lm_head = _float32_projection(processor._compute_lm_head)


def _float32_projection(projection: _Projection) -> _Projection:
    """projection: SGLang's original, used for any other weight."""

    def project(processor: Any, hidden_TH: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
        if _has_plain_weight(lm_head):
            return float32_product(hidden_TH, lm_head.weight)
        return projection(processor, hidden_TH, lm_head, embedding_bias)

    return project


def float32_product(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """[T, V] float32, accumulated and returned without rounding. weight_VH: bfloat16 or float16, on a GPU."""
    return torch.mm(hidden_TH.to(weight_VH.dtype), weight_VH.T, out_dtype=torch.float32)


def _has_plain_weight(lm_head: Any) -> bool:
    """Whether the projection is a single product with a 16-bit weight on a GPU, neither quantized nor wrapped by an adapter."""
    weight = getattr(lm_head, "weight", None)
    is_wrapped = hasattr(lm_head, "set_lora") and hasattr(lm_head, "apply_lora")
    if not isinstance(weight, Tensor) or not weight.is_cuda or is_wrapped:
        return False
    quant_method = getattr(lm_head, "quant_method", None)
    is_quantized = logits_processor.should_apply_lm_head_quant_method(lm_head, quant_method)
    return weight.dtype in (torch.bfloat16, torch.float16) and not is_quantized
