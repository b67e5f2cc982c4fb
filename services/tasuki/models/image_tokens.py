"""Tokens of a prompt that stand for its images: their places, and positions for the rotary embedding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.models.tower import Tower
from tasuki.wire.errors import InvalidArgument


def image_starts(token_ids: Sequence[int] | NDArray[Any], grids: NDArray[np.int64], tower: Tower) -> list[int]:
    """Places of each image's first token in a prompt.

    token_ids: with as many image tokens as the images of `grids` have. Raises InvalidArgument if there are others.
    """
    places = np.flatnonzero(np.asarray(token_ids) == tower.image_token_id)
    lengths = [tower.num_tokens(grid) for grid in grids]
    if len(places) != sum(lengths):
        raise InvalidArgument("images", f"have {sum(lengths)} tokens, but the prompt has {len(places)} in their places")
    firsts = np.cumsum([0, *lengths])[:-1]
    for first, length in zip(firsts.tolist(), lengths, strict=True):
        if places[first + length - 1] - places[first] != length - 1:
            raise InvalidArgument("images", f"the {length} tokens of an image are not contiguous in the prompt")
    return places[firsts].tolist()


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
