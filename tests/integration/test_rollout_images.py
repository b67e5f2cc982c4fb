"""Samples of prompts with images, against transformers' vision model. Engines start on a CPU, in float32, with one rank and two."""

import io
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tasuki.models.images import ImageProcessor, read_image_processor
from tasuki.models.known import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.trainer.data.samples import SampleImages, Samples
from tasuki.v1 import metrics_pb2, rollout_pb2, types_pb2
from tests.extent import only_whole
from tests.integration.rollout_process import TestTrainer, connected, start_rollout, stop_rollout, wait_until_serving
from tests.models import IMAGE_TOKEN, char_tokenizer, make_model, save_checkpoint, with_tower
from tests.routes import choices
from tests.vision import plain_image_log_probs

START, END = IMAGE_TOKEN + 1, IMAGE_TOKEN + 2
SIZES = ((40, 56), (9, 300), (64, 64), (17, 23))


def picture(seed: int) -> bytes:
    height, width = SIZES[seed % len(SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def shown(*parts: list[int] | bytes) -> rollout_pb2.Prompt:
    """A prompt of tokens and images."""
    token_ids = [token for part in parts for token in ([START, IMAGE_TOKEN, END] if isinstance(part, bytes) else part)]
    return rollout_pb2.Prompt(token_ids=token_ids, images=[part for part in parts if isinstance(part, bytes)])


def expected(whole: Any, processor: ImageProcessor, prompt: rollout_pb2.Prompt, sample: types_pb2.Sample) -> torch.Tensor:
    prepared = processor.expand(prompt.token_ids, prompt.images) if prompt.images else None
    token_ids = list(prompt.token_ids) if prepared is None else prepared.token_ids
    num_images = len(prompt.images)
    images = (
        None
        if prepared is None
        else SampleImages(
            num_images_S=np.array([num_images]),
            image_I=np.arange(num_images),
            start_I=np.array(prepared.starts),
            grids_U3=prepared.grids_I3,
            levels_PD=prepared.levels_PD,
            values_CL=prepared.values_CL,
            merge_size=2,
        )
    )
    assert sample.image_digest == (b"" if prepared is None else prepared.digest)
    one = Samples(
        num_prompt_S=np.array([len(token_ids)]),
        num_completion_S=np.array([len(sample.token_ids)]),
        policy_version_S=np.zeros(1, dtype=np.uint64),
        token_ids_T=np.array([*token_ids, *sample.token_ids], dtype=np.int32),
        columns={},
        images=images,
    )
    with torch.no_grad():
        return plain_image_log_probs(whole, one)


def check_routes(shape: RouteShape | None, sample: types_pb2.Sample, chosen: list[torch.Tensor]) -> None:
    """All tokens but the last, those of images too, have transformers' experts."""
    if shape is None:
        assert not sample.routed_experts
        return
    found = shape.read(sample.routed_experts).reshape(-1, shape.num_layers, shape.experts_per_token)
    np.testing.assert_array_equal(np.sort(found), np.sort(torch.stack(chosen, dim=1).numpy())[: len(found)])
    assert len(found) == len(chosen[0]) - 1


async def cached_tokens(client: Any) -> float:
    told = await client.metrics.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=60)
    lines = told.text.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:cached_tokens_total"))


def num_tokens(processor: ImageProcessor, prompt: rollout_pb2.Prompt) -> int:
    return len(processor.expand(prompt.token_ids, prompt.images).token_ids if prompt.images else prompt.token_ids)


async def json_strings(client: Any, prompt: rollout_pb2.Prompt) -> list[str]:
    """Completions by a schema of a policy that would draw a placeholder before anything else, then a quotation mark."""
    quote = char_tokenizer().get_vocab()['"']
    request = rollout_pb2.GenerateRequest(
        prompts=[prompt],
        num_samples=2,
        sampling_params=types_pb2.SamplingParams(
            max_new_tokens=9, json_schema='{"type": "string"}', logit_bias={IMAGE_TOKEN: 100, quote: 50}
        ),
    )
    samples = [each async for answer in client.rollout.Generate(request) for each in answer.samples]
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_STOP}
    return [str(char_tokenizer().decode(sample.token_ids[:-1])) for sample in samples]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "tp_size"),
    [
        ("qwen3_vl", 2),
        ("qwen2_5_vl", 2),  # which pads its tower
        ("qwen3_5_moe", 1),
        *(
            pytest.param(*case, marks=only_whole)
            for case in [("qwen3_vl", 1), ("qwen2_5_vl", 1), ("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 2)]
        ),
    ],
)
async def test_images_are_seen_as_transformers_sees_them(kind: str, tp_size: int, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model(kind, seed=1), tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<image>"] = IMAGE_TOKEN
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor |= {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = ('rollout.dtype="float32"', "rollout.engine.enable_metrics=true", f"rollout.tp_size={tp_size}")
    rollout = start_rollout(tmp_path / "node", folder, *settings)
    prompts = [
        shown([5, 6, 7], picture(0), [8, 9]),
        shown([5, 6, 7], picture(4), [8, 9]),  # of the same size
        shown([50], picture(1), [3], picture(2), picture(3), [4]),
        shown([90, 3, 61]),
        shown(picture(0)),
    ]
    read, routes = read_image_processor(folder), RouteShape.of(read_model_shape(folder))
    assert read is not None
    try:
        wait_until_serving(rollout)
        for version in (1, 2):
            changed = make_model(kind, seed=version)  # its tower, too
            whole = with_tower(changed)
            trainer = TestTrainer(rollout.socket_dir, f"trainer-{version}", changed, dtype=torch.float32)
            async with connected(rollout) as client:
                await client.wake(trainer.publish(version))
                turn, before, wanted = prompts, await cached_tokens(client), 0
                for _ in range(2):
                    request = rollout_pb2.GenerateRequest(
                        prompts=turn,
                        num_samples=2,
                        sampling_params=types_pb2.SamplingParams(max_new_tokens=9, ignore_eos=True),
                    )
                    samples = [each async for answer in client.rollout.Generate(request) for each in answer.samples]
                    assert len(samples) == 2 * len(turn)
                    for sample in samples:
                        with choices(whole) as chosen:
                            theirs = expected(whole, read, turn[sample.prompt_index], sample)
                        check_routes(routes, sample, chosen)
                        torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), theirs, rtol=0, atol=1e-5)
                    # The next turn continues the first with an image more; the engine has cached its prefix.
                    now = await cached_tokens(client)
                    assert now - before >= wanted
                    before, wanted = now, sum(num_tokens(read, turn[one.prompt_index]) + 8 for one in samples)
                    turn = [
                        rollout_pb2.Prompt(
                            token_ids=[*turn[each.prompt_index].token_ids, *each.token_ids, 9, *added.token_ids],
                            images=[*turn[each.prompt_index].images, *added.images],
                        )
                        for each, added in zip(samples, cycle([shown(picture(5)), shown(), shown(picture(0))]))
                    ]
                assert await json_strings(client, prompts[0]) == ['""'] * 2
                await client.sleep()
            trainer.close()
    finally:
        stop_rollout(rollout)
