"""Qwen2.5-VL's vision tower in SGLang, with rotary angles in float32.

SGLang rounds the angles to the engine's dtype (Qwen2_5_VisionTransformer.forward), in bfloat16 by up to a quarter of a radian, and takes
patches of other than 1,176 numbers for embeddings (get_image_feature). Delete this when it does not.
"""

from typing import Any

import torch
from torch import Tensor


def install_window_tower() -> None:
    """Changes the classes of this process. Call it before the model is built."""
    from sglang.srt.models import qwen2_5_vl

    changed: tuple[Any, Any] = qwen2_5_vl.Qwen2_5_VisionTransformer, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    changed[0].forward, changed[1].get_image_feature = _embeddings, _image_feature


def _image_feature(self: Any, items: list[Any]) -> Tensor:
    pixels_PD, grids_I3 = (torch.cat([getattr(item, name) for item in items]) for name in ("feature", "image_grid_thw"))
    return self.visual(pixels_PD, grid_thw=grids_I3)


def _embeddings(self: Any, x: Tensor, grid_thw: Tensor) -> Tensor:
    """x: patches [P, D]. grid_thw: [I, 3]. Returns the embeddings of all images, in order."""
    from sglang.srt.layers.attention.vision import prepare_vision_attention_metadata

    hidden_PH = self.patch_embed(x.to(self.device, self.dtype))
    places, ends = self.get_window_index(grid_thw)
    places = places.to(self.device)

    def by_window(each: Tensor) -> Tensor:
        return each.unflatten(0, (-1, self.spatial_merge_unit))[places].flatten(0, 1)

    angles_PD = by_window(self.rot_pos_emb(grid_thw).float()).repeat(1, 2)
    rotation = angles_PD.cos(), angles_PD.sin()
    windows = torch.tensor(ends, dtype=torch.int32, device=self.device).unique_consecutive()
    images = torch.nn.functional.pad(grid_thw.prod(dim=1).cumsum(0), (1, 0)).to(self.device, torch.int32)
    spans = [(each, prepare_vision_attention_metadata(each, device=self.device)) for each in (windows, images)]
    hidden_P1H = by_window(hidden_PH).unsqueeze(1)
    for index, block in enumerate(self.blocks):
        cu_seqlens, metadata = spans[index in self.fullatt_block_indexes]
        hidden_P1H = block(hidden_P1H, cu_seqlens=cu_seqlens, position_embeddings=rotation, forward_metadata=metadata)
    return self.merger(hidden_P1H)[places.argsort()]
