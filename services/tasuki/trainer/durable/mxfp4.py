"""MXFP4, in which gpt-oss is published: 32 values of 4 bits (e2m1) with one exponent (e8m0).

Source: OCP Microscaling Formats v1.0, sec. 5.
"""

import torch
from torch import Tensor

_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_EXPONENT_BIAS = 127


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[R, 32 G] float32, exact also in bfloat16.

    blocks: [R, G, 16] uint8, the first of two values in the lower half. scales: [R, G] uint8.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    fours = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[fours.int()], (scales.int() - _EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)
