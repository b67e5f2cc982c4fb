"""Images of a request as SGLang's models take them: as patches, without its processors, which read some images and texts otherwise."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from hashlib import sha256
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE, Modality, MultimodalDataItem, MultimodalProcessorOutput

from tasuki.algorithms.levels import pixels_of
from tasuki.models.images import Prepared, image_positions
from tasuki.rollout.generate import EngineRequest

_Embed = Callable[[Any, list[MultimodalDataItem]], torch.Tensor]
_HASH_BYTES = 16
_PAD_BITS = 61
_VALUES = "level_values"
_RECEIVED = WeakValueDictionary[int, torch.Tensor]()
"""Levels of the images in this rank's requests, by digest."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """In the place of an image's levels in a request to a rank, which SGLang pickles apart from its batch: the levels when it is read."""

    digest: int
    levels_PD: torch.Tensor | None
    """None if an earlier request of the batch has them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.digest, self.levels_PD)


def _received(digest: int, levels_PD: torch.Tensor | None) -> torch.Tensor:
    return _RECEIVED[digest] if levels_PD is None else _RECEIVED.setdefault(digest, levels_PD)


def install_levels() -> None:
    """Makes the towers of this process take images as levels: until they are computed with, an eighth of the pixels' bytes."""
    from sglang.srt.models import qwen2_5_vl, qwen3_vl

    for model in (qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, qwen3_vl.Qwen3VLForConditionalGeneration):
        cast(Any, model).get_image_feature = _from_levels(model.get_image_feature)


def _from_levels(embed: _Embed) -> _Embed:
    """embed: SGLang's original, which takes pixels."""

    @wraps(embed)
    def embed_levels(model: Any, items: list[MultimodalDataItem]) -> torch.Tensor:
        num_frames = model.visual.patch_embed.temporal_patch_size
        with_pixels = [copy(item) for item in items]
        for item in with_pixels:
            values_CL = item.model_specific_data[_VALUES].to(model.visual.device, model.visual.dtype)
            item.feature = pixels_of(cast(torch.Tensor, item.feature), values_CL, num_frames=num_frames)
        return embed(model, with_pixels)

    return embed_levels


def image_inputs(prompt: Prepared, *, merge_size: int, max_new_tokens: int) -> MultimodalProcessorOutput:
    """The images of a prompt, for its samples. merge_size: rows and columns of patches that one token stands for."""
    num_prompt, grids_I3 = len(prompt.token_ids), prompt.grids_I3
    # SGLang computes positions where these end, but not in a prefill of a completion's tokens, after a retraction.
    positions_3T = image_positions(num_prompt + max_new_tokens, starts=prompt.starts, grids=grids_I3, merge_size=merge_size)
    items: list[MultimodalDataItem] = []
    patches, values_CL = np.split(prompt.levels_PD, np.cumsum(grids_I3.prod(axis=1))[:-1]), torch.tensor(prompt.values_CL)
    for start, grid, levels_PD in zip(prompt.starts, grids_I3, patches, strict=True):
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=[(start, start + len(levels_PD) // merge_size**2 - 1)],
            model_specific_data={"image_grid_thw": torch.tensor(grid[None]), _VALUES: values_CL},
        )
        # By which SGLang finds embeddings that it computed for another request.
        digest = int.from_bytes(sha256(grid.tobytes() + levels_PD.tobytes()).digest()[:_HASH_BYTES])
        item.set_hash(digest)
        item.feature = cast(Any, _Sent(digest, torch.from_numpy(levels_PD)))
        # Its cache of prefixes knows an image by the ids in its place, of which SGLang draws 30 bits: few enough for two to meet.
        item.pad_value = MM_PAD_SHIFT_VALUE + digest % (1 << _PAD_BITS)
        items.append(item)
    return MultimodalProcessorOutput(
        mm_items=items,
        im_token_id=prompt.token_ids[prompt.starts[0]],
        mrope_positions=torch.from_numpy(positions_3T),
        mrope_position_delta=torch.tensor([[int(positions_3T[:, :num_prompt].max()) + 1 - num_prompt]]),
    )


def give_images(tokenized: Sequence[Any], requests: Sequence[EngineRequest], *, merge_size: int) -> None:
    """Gives SGLang's requests, which are sent to a replica as one batch, the images of their prompts, each prompt's once."""
    made: dict[int, MultimodalProcessorOutput] = {}
    for one, request in zip(tokenized, requests, strict=True):
        prompt = request.images
        if prompt is None:
            continue
        if (inputs := made.get(id(prompt))) is None:
            most = cast(int, request.sampling["max_new_tokens"])
            inputs = image_inputs(prompt, merge_size=merge_size, max_new_tokens=most)
            made[id(prompt)] = _copied(inputs)
            for item in made[id(prompt)].mm_items:
                item.feature = cast(Any, _Sent(cast(_Sent, item.feature).digest, None))
        # It frees the pixels of each item when its request ends.
        one.mm_inputs = _copied(inputs)


def _copied(inputs: MultimodalProcessorOutput) -> MultimodalProcessorOutput:
    inputs = copy(inputs)
    inputs.mm_items = [copy(item) for item in inputs.mm_items]
    return inputs
