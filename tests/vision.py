"""Samples with images of random sizes, and what transformers computes of them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tasuki.models.tower import Tower
from tasuki.trainer.data.samples import SampleImages, Samples, ranges, starts
from tasuki.v1.types_pb2 import TrainingSample
from tests.models import IMAGE_TOKEN

GRIDS_U3 = np.array([[1, 4, 6], [1, 2, 2], [1, 10, 4], [1, 20, 22]])
IMAGES_OF = ([0], [], [1, 2], [3, 0], [0], [0])
"""Images of each sample: the last two have the same prompt but for the image of another, and a prompt in common."""


def image_samples(tower: Tower, *, seed: int = 0) -> Samples:
    """Prompts with none, one and two images between random tokens, one of them in a completion; another has an image token that is text."""
    random = np.random.default_rng(seed)
    prompts, completions, starts_I = [list[int]() for _ in IMAGES_OF], list[list[int]](), list[int]()
    for prompt, images in zip(prompts, IMAGES_OF, strict=True):
        prompt += _text(random, 2, 6)
        for image in images:
            starts_I.append(len(prompt))
            prompt += [IMAGE_TOKEN] * tower.num_tokens(GRIDS_U3[image]) + _text(random, 1, 4)
        completions.append(_text(random, 2, 9))
    prompts[-1] = prompts[-2]
    starts_I[-1] = starts_I[-2]
    completions[2][0] = IMAGE_TOKEN
    start = starts_I[4] - 1  # the completion of the fourth sample begins before its second image
    completions[3], prompts[3] = prompts[3][start:] + completions[3], prompts[3][:start]
    num_completion_S = np.array(list(map(len, completions)))
    return Samples(
        num_prompt_S=np.array(list(map(len, prompts))),
        num_completion_S=num_completion_S,
        policy_version_S=np.zeros(len(prompts), dtype=np.uint64),
        token_ids_T=np.concatenate([[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]),
        columns={"loss_mask": np.ones(num_completion_S.sum(), dtype=np.float32)},
        images=SampleImages(
            num_images_S=np.array(list(map(len, IMAGES_OF))),
            image_I=np.concatenate(IMAGES_OF).astype(np.int64),
            start_I=np.array(starts_I),
            grids_U3=GRIDS_U3,
            levels_PD=random.integers(
                0, 256, (GRIDS_U3.prod(axis=1).sum(), tower.patch_shape[0] * tower.patch_shape[2] ** 2), np.uint8
            ),
            values_CL=random.standard_normal((tower.patch_shape[0], 256), dtype=np.float32),
            merge_size=tower.merge_size,
        ),
    )


def _text(random: Any, least: int, most: int) -> list[int]:
    return random.integers(3, IMAGE_TOKEN, random.integers(least, most)).tolist()


def plain_image_log_probs(whole: PreTrainedModel, samples: Samples) -> Tensor:
    """[N]: transformers' log-probs of each completion token, sample by sample. whole: transformers' vision model."""
    model: Any = whole
    images = samples.images
    scores: list[Tensor] = []
    for index, first in enumerate(starts(samples.num_tokens_S).tolist()):
        num_prompt, num_tokens = int(samples.num_prompt_S[index]), int(samples.num_tokens_S[index])
        ids_1T = torch.tensor(samples.token_ids_T[first : first + num_tokens])[None].long()
        is_image_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
        embeddings, places, added = model.get_input_embeddings()(ids_1T), None, {}
        if images is not None and len(own := images.of(index)):
            one = images.select(np.array([index])).used()
            lengths = one.num_tokens_U[one.image_I]
            is_image_1T[0, ranges(one.start_I, lengths)] = True
            order = np.concatenate([[np.flatnonzero(np.unique(own) == each)[0]] for each in own])
            pixels = torch.cat([plain_pixels(one.levels_of(np.array([each])), one.values_CL) for each in order])
            places = torch.tensor(one.grids_U3[order])
            found = model.model.visual(pixels, grid_thw=places)
            embeddings = embeddings.masked_scatter(is_image_1T[..., None], found.pooler_output)
            if hasattr(found, "deepstack_features"):
                added = {"visual_pos_masks": is_image_1T, "deepstack_visual_embeds": found.deepstack_features}
        positions, _ = model.model.get_rope_index(ids_1T, is_image_1T.int(), image_grid_thw=places)
        hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, **added).last_hidden_state
        log_probs_TV = torch.log_softmax(model.lm_head(hidden)[0], dim=-1)
        scores.append(log_probs_TV[num_prompt - 1 : -1].gather(1, ids_1T[0, num_prompt:, None])[:, 0])
    return torch.cat(scores)


def plain_pixels(levels_PD: NDArray[np.uint8], values_CL: NDArray[np.float32]) -> Tensor:
    """Patches of 3 channels and 2 equal frames as transformers takes them."""
    channels = [values_L[levels] for values_L, levels in zip(values_CL, np.split(levels_PD, 3, axis=1), strict=True)]
    return torch.tensor(np.concatenate([part for channel in channels for part in (channel, channel)], axis=1))


_VALUES_CL = np.random.default_rng(0).standard_normal((3, 256), dtype=np.float32)
_LEVELS_OF = [
    np.random.default_rng(index).integers(0, 256, (grid.prod(), 48), np.uint8) for index, grid in enumerate(GRIDS_U3[:3])
]


def put_images(samples: list[TrainingSample]) -> None:
    """Begins every third prompt with an image, named by its index; no other token of a prompt stands for one."""
    for index, sample in enumerate(samples):
        text = [min(token, IMAGE_TOKEN - 1) for token in sample.prompt_token_ids]
        image = index // 3 % 3
        num_tokens = int(GRIDS_U3[image].prod()) // 4 if index % 3 == 0 else 0
        sample.images[:] = [b"%d" % image] * (index % 3 == 0)
        sample.prompt_token_ids[:] = [IMAGE_TOKEN] * num_tokens + text
        sample.completion_token_ids[:] = [min(token, IMAGE_TOKEN - 1) for token in sample.completion_token_ids]


def take_images(samples: list[TrainingSample]) -> SampleImages:
    """The images that `put_images` gave; takes them from the samples."""
    given = np.array([int(image) for sample in samples for image in sample.images])
    num_images_S = np.array([len(sample.images) for sample in samples])
    for sample in samples:
        sample.images[:] = []
    return SampleImages(
        num_images_S=num_images_S,
        image_I=given,
        start_I=np.zeros_like(given),
        grids_U3=GRIDS_U3[:3],
        levels_PD=np.concatenate(_LEVELS_OF),
        values_CL=_VALUES_CL,
        merge_size=2,
    )


def plain_inputs(sample: TrainingSample) -> dict[str, Tensor]:
    """Arguments of transformers' vision model for the image of a sample."""
    if not sample.images:
        return {}
    index = int(sample.images[0])
    token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
    is_image = (token_ids == IMAGE_TOKEN).int()
    grid = torch.tensor(GRIDS_U3[index : index + 1])
    pixels = plain_pixels(_LEVELS_OF[index], _VALUES_CL)
    return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": is_image}
