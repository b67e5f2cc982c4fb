"""Positions of a prompt with images for the rotary embedding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def image_positions(num_tokens: int, *, starts: Sequence[int], grids: NDArray[np.int64], merge_size: int) -> NDArray[np.int64]:
    """[3, T]: time, row and column of every token for the rotary embedding. starts: places of the images' first tokens.

    Text counts on in all three; an image's tokens have its first position in time, and their own rows and columns from there. Text
    after it continues at the largest position and one.
    """
    parts: list[NDArray[np.int64]] = []
    end = position = 0
    for start, (frames, rows, columns) in zip(starts, grids.tolist(), strict=True):
        text, height, width = start - end, rows // merge_size, columns // merge_size
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        position += text
        parts.append(np.indices((frames, height, width)).reshape(3, -1) + position)
        position += max(height, width)
        end = start + frames * height * width
    text = num_tokens - end
    parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
    return np.concatenate(parts, axis=1)
