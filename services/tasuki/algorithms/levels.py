"""Pixels of images from their levels of 8 bits."""

import torch
from torch import Tensor


def pixels_of(levels_PD: Tensor, values_CL: Tensor, *, num_frames: int) -> Tensor:
    """[P, D * num_frames]: patches as transformers' processor makes them, with equal frames, in the dtype and on the device of the values.

    levels_PD: uint8, of each channel its rows and columns. values_CL: what a model reads for each channel's 256 levels.
    """
    levels_PCS = levels_PD.to(values_CL.device).unflatten(1, (len(values_CL), -1))
    channels = [values_L[levels_PS.int()] for values_L, levels_PS in zip(values_CL, levels_PCS.unbind(1), strict=True)]
    return torch.stack(channels, dim=1).unsqueeze(2).expand(-1, -1, num_frames, -1).flatten(1)
