"""DoRA (arXiv:2402.09353): rows of W + scaling B A, scaled to trained magnitudes. W, A and B are whole, or W and B a rank's rows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class Dora:
    """PEFT's variant of a LoRA layer, without its matrices [in, in] and [out, in]."""

    @staticmethod
    def forward(module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """The layer's output [T, out]. result: its base's. Norms count as constants, as in the paper's section 4.3."""
        base, a, b = module.get_base_layer(), module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling, magnitude = module.scaling[active_adapter], module.lora_magnitude_vector[active_adapter].weight
        factor = magnitude.float() / row_norms(base.weight, a.weight, b.weight, scaling=scaling)
        dropped = module.lora_dropout[active_adapter](x)
        own = result if base.bias is None else result - base.bias
        kept = own if dropped is x else linear(dropped, base.weight)
        added = scaling * b(a(dropped))
        return result + added + (factor - 1).to(result.dtype) * (kept + added)


@torch.no_grad()
def row_norms(base: Tensor, a: Tensor, b: Tensor, *, scaling: float) -> Tensor:
    """Norms of the rows of W + scaling B A, [out] float32, from products of the size of A and B.

    Rounded to the dtype of W, as are magnitudes: a new adapter changes nothing, and merging computes the same as training.
    """
    a, b = a.to(base.dtype), b.to(base.dtype).float()
    squares = torch.linalg.vector_norm(base, dim=1, dtype=torch.float32).square()
    squares += 2 * scaling * ((base @ a.T).float() * b).sum(dim=1)
    squares += scaling**2 * (b @ (a.float() @ a.float().T) * b).sum(dim=1)
    return squares.sqrt().to(base.dtype).float()
