"""Qwen 2.5 VL, 3 VL and 3.5 as causal language models beside a vision tower, whose embeddings of images take the places of image tokens."""

import math
from contextlib import nullcontext
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Qwen2_5_VLTextConfig,
    Qwen2ForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3ForCausalLM,
    Qwen3VLTextConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from tasuki.algorithms.levels import pixels_of
from tasuki.trainer.data.micro_batch import TokenBatch

# With "flash" in its name transformers gives it the bounds of all sequences.
_ATTENTION = "tasuki_flash_by_length"


class _MRotaryEmbedding(Qwen2_5_VLRotaryEmbedding):
    """Takes each section of cosines and sines from the positions in time, rows or columns, once for all layers."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: [3, 1, T], or [1, T] equal ones. Returns [1, T, D] each, as a Qwen 2 takes them."""
        positions_31T = position_ids if position_ids.dim() == 3 else position_ids.expand(3, *position_ids.shape)
        sections = cast(Any, self.config).rope_parameters["mrope_section"]
        parts = (positions_31T.unsqueeze(-1).float() * self.inv_freq.float()).split(sections, dim=-1)
        angles_1TD = torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1).repeat(1, 1, 2)
        cos, sin = (each.mul(self.attention_scaling).to(x.dtype) for each in (angles_1TD.cos(), angles_1TD.sin()))
        return cos, sin


class Qwen2_5_VLForCausalLM(Qwen2ForCausalLM):  # noqa: N801  as transformers names its own
    """A Qwen 2, and the tower as `visual` if the configuration has a `vision_config`."""

    config_class = Qwen2_5_VLTextConfig

    def __init__(self, config: Qwen2_5_VLTextConfig) -> None:
        super().__init__(cast(Any, config))
        self.model.rotary_emb = cast(Any, _MRotaryEmbedding(cast(Any, config)))
        _add_tower(self, config, Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel)


class Qwen3VLForCausalLM(Qwen3ForCausalLM):
    """The text, and the tower as `visual` if the configuration has a `vision_config`."""

    config_class = Qwen3VLTextConfig

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        Qwen3PreTrainedModel.__init__(self, config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        _add_tower(self, config, Qwen3VLVisionConfig, Qwen3VLVisionModel)
        self.post_init()


class Qwen3_5ForCausalLM(transformers.Qwen3_5ForCausalLM):  # noqa: N801  as transformers names its own
    """transformers' text, and the tower as `visual` if the configuration has a `vision_config`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _add_tower(self, config, Qwen3_5VisionConfig, Qwen3_5VisionModel)


class Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeForCausalLM):  # noqa: N801  as transformers names its own
    """The same with experts."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for it in the file of the class

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _add_tower(self, config, Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel)


def _add_tower(causal_lm: Any, config: Any, of_config: Any, of_tower: Any) -> None:
    if (vision := getattr(config, "vision_config", None)) is not None:
        tower = of_config(**vision)
        tower._attn_implementation = "sdpa"
        causal_lm.visual = of_tower(tower).requires_grad_(False)
        causal_lm.visual.rotary_pos_emb._buffers.pop("original_inv_freq", None)  # a copy, from transformers 5.19 on
        causal_lm.visual.config._attn_implementation = _ATTENTION


# transformers keeps a class for a configuration of its own only with exist_ok, silently.
AutoModelForCausalLM.register(Qwen2_5_VLTextConfig, Qwen2_5_VLForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Qwen3_5TextConfig, Qwen3_5ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Qwen3VLTextConfig, Qwen3VLForCausalLM, exist_ok=True)


def learns(module: nn.Module) -> bool:
    """Whether any parameter of it is trained."""
    return any(param.requires_grad for param in module.parameters())


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
        grids_U3, values_CL = images.grids_U3, torch.tensor(images.distinct.values_CL).to(embeddings_TH)
        pixels_PD = pixels_of(images.levels_PD, values_CL, num_frames=patch_shape[1])
    is_trained = learns(tower)
    with nullcontext() if is_trained else torch.no_grad():
        found = tower(pixels_PD, grid_thw=grids_U3)
    if images is None:
        # Ranks reduce gradients of the same parameters.
        unused = [found.pooler_output, *getattr(found, "deepstack_features", ())] if is_trained else []
        return {"inputs_embeds": embeddings_TH.unsqueeze(0) + sum(0 * each.sum() for each in unused)}
    embeddings_TH = embeddings_TH.index_copy(0, images.places_I, found.pooler_output[images.rows_I].to(embeddings_TH.dtype))
    if not hasattr(found, "deepstack_features"):
        return {"inputs_embeds": embeddings_TH.unsqueeze(0)}
    mask_T = torch.zeros_like(batch.input_ids_T, dtype=torch.bool).index_fill(0, images.places_I, True)
    return {
        "inputs_embeds": embeddings_TH.unsqueeze(0),
        "visual_pos_masks": mask_T.unsqueeze(0),
        "deepstack_visual_embeds": [features[images.rows_I] for features in found.deepstack_features],
    }


def _attend_by_length(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Results [1, P, H, D] of images or windows whose bounds are `cu_seq_lens_q`. query, key, value: [1, H, P, D].

    One call for all of equal length, where transformers makes one for each.
    """
    bounds_S = cu_seq_lens_q.long()
    starts_S, lengths_S = bounds_S[:-1], bounds_S.diff()
    lengths = lengths_S.unique().tolist()
    rows = [(starts_S[lengths_S == length, None] + torch.arange(length, device=query.device)).flatten() for length in lengths]
    results: list[Tensor] = []
    for length, rows_P in zip(lengths, rows, strict=True):
        packed = (each[0] if len(lengths) == 1 else each[0].index_select(1, rows_P) for each in (query, key, value))
        q, k, v = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in packed)
        results.append(scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    if len(lengths) == 1:
        return results[0].unsqueeze(0), None
    return torch.cat(results)[torch.cat(rows).argsort()].unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend_by_length)
