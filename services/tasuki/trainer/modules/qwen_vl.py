"""Qwen 3 VL as a causal language model beside a vision tower, whose embeddings of images take the places of image tokens."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3VLTextConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from tasuki.trainer.data.micro_batch import ImageBatch, TokenBatch


class Qwen3VLForCausalLM(Qwen3ForCausalLM):
    """The text, and the tower as `visual` if the configuration has a `vision_config`."""

    config_class = Qwen3VLTextConfig

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        Qwen3PreTrainedModel.__init__(self, config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if (vision := getattr(config, "vision_config", None)) is not None:
            tower = Qwen3VLVisionConfig(**vision)
            tower._attn_implementation = "sdpa"
            self.visual = Qwen3VLVisionModel(tower).requires_grad_(False)
        self.post_init()


AutoModelForCausalLM.register(Qwen3VLTextConfig, Qwen3VLForCausalLM)


def text_inputs(causal_lm: nn.Module, batch: TokenBatch) -> dict[str, Any]:
    """Arguments of the text model: token ids, or embeddings with those of images. Runs the tower on a blank image without any.

    All ranks must gather the tower equally often.
    """
    tower = cast(Any, getattr(causal_lm, "visual", None))
    images = batch.images
    if tower is None:
        return {"input_ids": batch.input_ids_T.unsqueeze(0)}
    embeddings_TH: Tensor = cast(Any, causal_lm).model.embed_tokens(batch.input_ids_T)
    patch_shape = tower.patch_embed.proj.weight.shape[1:]
    if images is None:
        side = tower.spatial_merge_size
        grids_U3 = torch.tensor([[1, side, side]], device=embeddings_TH.device)
        pixels_PD = embeddings_TH.new_zeros(side * side, math.prod(patch_shape))
    else:
        grids_U3, pixels_PD = images.grids_U3, _pixels(images, num_frames=patch_shape[1], like=embeddings_TH)
    with torch.no_grad():
        found = tower(pixels_PD, grid_thw=grids_U3)
    if images is None:
        return {"inputs_embeds": embeddings_TH.unsqueeze(0)}
    embeddings_TH = embeddings_TH.index_copy(0, images.places_I, found.pooler_output[images.rows_I].to(embeddings_TH.dtype))
    mask_T = torch.zeros_like(batch.input_ids_T, dtype=torch.bool).index_fill(0, images.places_I, True)
    return {
        "inputs_embeds": embeddings_TH.unsqueeze(0),
        "visual_pos_masks": mask_T.unsqueeze(0),
        "deepstack_visual_embeds": [features[images.rows_I] for features in found.deepstack_features],
    }


def _pixels(images: ImageBatch, *, num_frames: int, like: Tensor) -> Tensor:
    """[P, D * num_frames]: patches as transformers' processor makes them, in the dtype of the tower."""
    values_CL, levels_PD = images.values_CL.to(like), images.levels_PD.to(like.device)
    levels_PCS = levels_PD.unflatten(1, (len(values_CL), -1))
    channels = [values_L[levels_PS.int()] for values_L, levels_PS in zip(values_CL, levels_PCS.unbind(1), strict=True)]
    return torch.stack(channels, dim=1).unsqueeze(2).expand(-1, -1, num_frames, -1).flatten(1)
