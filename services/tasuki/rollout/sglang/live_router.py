"""Routers of GLM 4.5 and 4.7 Flash that follow a sync.

SGLang's `Glm4MoeGate` and `Glm4MoeLiteGate` keep a float32 copy of their first weight, which later weights would not reach ("must be
invalidated" in their sources, models/glm4_moe.py). Delete this file when they keep none.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import linear


def install_live_routers() -> None:
    """Makes GLM's routers of this process read their weight in every pass, in CUDA graphs too."""
    from sglang.srt.models import glm4_moe, glm4_moe_lite

    gates: tuple[Any, ...] = (glm4_moe.Glm4MoeGate, glm4_moe_lite.Glm4MoeLiteGate)
    for gate in gates:
        gate.forward = _logits


def _logits(gate: Any, hidden_TH: Tensor) -> Tensor:
    """[T, E] float32."""
    return linear(hidden_TH.float(), gate.weight.float())
