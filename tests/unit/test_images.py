"""Images of prompts: what is refused, and patches equal to those of the folder's processor."""

import json
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.models import images
from tasuki.models.images import ImageProcessor
from tasuki.models.tower import Tower
from tasuki.rollout.generate import prepared_images
from tasuki.rollout.model import ModelFacts
from tasuki.trainer.data.checks import check_columns
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.service import requests
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.service.training import _rows_of
from tasuki.trainer.wire import Role, decode_parts, encode_parts
from tasuki.v1.rollout_pb2 import GenerateRequest, Prompt
from tasuki.v1.types_pb2 import TrainingSample, VersionSpan
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.images import send_once
from tests.refusal import refusing

START, IMAGE, VIDEO, END = 252, 250, 251, 253
_TOWER = Tower(
    image_token_id=IMAGE,
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    patch_shape=(3, 2, 16, 16),
    merge_size=2,
    num_positions=16,
    out_size=8,
    deepstack=(),
)
_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def _folder(path: Path, *, settings: dict[str, Any], file: str = "preprocessor_config.json") -> Path:
    (path / "config.json").write_text(
        json.dumps({"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO})
    )
    own = {**_SETTINGS, **settings}
    (path / file).write_text(json.dumps({"image_processor": own} if file.startswith("processor") else own))
    return path


def _picture(height: int, width: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _file(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    "settings", [{"size": {"shortest_edge": 1024, "longest_edge": 16384}}, {"min_pixels": 4096, "max_pixels": 65536}, {}]
)
def test_patches_are_those_of_the_folders_processor(
    tmp_path: Path, settings: dict[str, Any], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoImageProcessor, Qwen2VLImageProcessor

    # Its constructor writes min_pixels into the class's own dict, which the next test would read.
    monkeypatch.setattr(Qwen2VLImageProcessor, "size", dict(Qwen2VLImageProcessor.size))
    processor = ImageProcessor(_folder(tmp_path, settings=settings, file=file), _TOWER)
    oracle = AutoImageProcessor.from_pretrained(tmp_path)
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [
        *(_file(_picture(*edges)) for edges in [(40, 56), (1, 1), (700, 500), (33, 200), (3, 400)]),
        _file(_picture(90, 40), "JPEG"),
        _file(_picture(90, 40), "WEBP"),
        *(_file(_picture(30, 60).convert(mode)) for mode in ("L", "P", "RGBA")),
    ]
    prepared = processor.expand([7, *[START, IMAGE, END] * len(files), 8], files)
    wanted = oracle(images=[Image.open(BytesIO(file)) for file in files], return_tensors="np")
    np.testing.assert_array_equal(prepared.pixels(2), wanted["pixel_values"])
    np.testing.assert_array_equal(prepared.grids_I3, wanted["image_grid_thw"])
    counts = [int(grid.prod()) // 4 for grid in wanted["image_grid_thw"]]
    assert prepared.token_ids == [7, *(token for count in counts for token in (START, *[IMAGE] * count, END)), 8]
    assert [processor.num_tokens(file, field="image") for file in files] == counts
    upright, lying = (
        processor.expand([START, IMAGE, END], [_file(_picture(60, 90), "JPEG", **more)]).grids_I3
        for more in ({"exif": turned}, {})
    )
    assert upright.tolist() == [[1, *lying[0, :0:-1]]] != lying.tolist()


def test_picture_whose_exif_cannot_be_written_again_is_turned(tmp_path: Path) -> None:
    entries = (0x0100, 2, 2, b"x\0\0\0"), (0x0112, 3, 1, b"\0\6\0\0")  # a width that is text, and a quarter turn
    exif = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + b"".join(struct.pack(">HHI4s", *each) for each in entries) + bytes(4)
    processor = ImageProcessor(_folder(tmp_path, settings={"size": {"shortest_edge": 1024, "longest_edge": 16384}}), _TOWER)
    upright, lying = (processor.patches(_file(_picture(60, 90), "JPEG", exif=each), field="")[1] for each in (exif, b""))
    assert upright.tolist() == [[1, *lying[0, :0:-1]]] != lying.tolist()


def test_threads_decode_only_so_many_pixels_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    decoding, most, upright = 0, 0, images._upright

    def watched(opened: Image.Image, *, field: str) -> Image.Image:
        nonlocal decoding, most
        decoding += 1
        most = max(most, decoding)
        time.sleep(0.02)
        decoding -= 1
        return upright(opened, field=field)

    monkeypatch.setattr(images, "_upright", watched)
    monkeypatch.setattr(images, "MAX_FILE_PIXELS", 2 * 40 * 56)
    files = [_file(_picture(40, 56, seed=seed)) for seed in range(8)] + [_file(_picture(50, 60))[:-300]]
    with ThreadPoolExecutor(9) as threads:
        ended = [threads.submit(processor.num_tokens, file, field="image") for file in files]
    assert [each.exception() is None for each in ended] == [True] * 8 + [False] and most <= 2


def test_digest_is_of_the_images_alone(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    one, other = (_file(_picture(40, 56, seed=seed)) for seed in (0, 1))
    digest = processor.expand([START, IMAGE, END], [one]).digest
    assert processor.expand([7, START, IMAGE, END, 8], [one]).digest == digest
    assert processor.expand([START, IMAGE, END], [other]).digest != digest
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**_SETTINGS, "image_std": [0.5, 0.6, 0.71]}))
    assert ImageProcessor(tmp_path, _TOWER).expand([START, IMAGE, END], [one]).digest != digest


def _png(width: int, height: int, *, depth: int, content: bytes, kind: int = 2, text: bytes = b"") -> bytes:
    def chunk(kind: bytes, inner: bytes) -> bytes:
        return struct.pack(">I", len(inner)) + kind + inner + struct.pack(">I", zlib.crc32(kind + inner))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = [
        *((b"tEXt", each) for each in (text,) if each),
        (b"IHDR", header),
        (b"IDAT", zlib.compress(content)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


_SMALL = _picture(40, 56)
_REFUSED = {
    "empty": b"",
    "text": b"hello",
    "gif": _file(_SMALL, "GIF"),
    "cut png": _file(_SMALL)[:-300],
    "cut jpeg": _file(_SMALL, "JPEG")[:-300],
    "cut webp": _file(_SMALL, "WEBP")[:-300],
    "cmyk": _file(_SMALL.convert("CMYK"), "JPEG"),
    "grey of 16 bits": _file(Image.fromarray(np.full((9, 9), 300, np.uint16))),
    "colour of 16 bits": _png(4, 4, depth=16, content=(b"\0" + b"\1" * 24) * 4),
    "colour of 16 bits after a text": _png(4, 4, depth=16, content=(b"\0" + b"\1" * 24) * 4, text=b"title\0of a picture"),
    "palette without colours": _png(4, 4, depth=8, content=b"\0" * 20, kind=3),
    "no pixels": _png(0, 4, depth=8, content=b"\0" * 4),
    "animated png": _file(_SMALL, save_all=True, append_images=[_SMALL.rotate(90)]),
    "animated webp": _file(_SMALL, "WEBP", save_all=True, append_images=[_SMALL.rotate(90)]),
    "bomb": _png(20_000, 20_000, depth=8, content=b""),
    "large": _png(9_000, 9_000, depth=8, content=b""),
    "thin": _file(Image.new("L", (1000, 2))),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_file_that_is_no_plain_image_is_refused(tmp_path: Path, kind: str) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    for use in (
        lambda: processor.num_tokens(_REFUSED[kind], field="prompts[2].images[0]"),
        lambda: processor.expand([START, IMAGE, END], [_REFUSED[kind]], field="prompts[2]"),
    ):
        with refusing("prompts[2].images[0]"):
            use()


async def test_prompt_that_is_too_long_with_its_images_is_refused_before_one_is_decoded(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    model = ModelFacts(
        path="", architecture="", vocab_size=300, context_length=99, stop_token_ids=(1,), is_seeded=False, images=processor
    )
    good, cut = _file(_SMALL), _png(600, 600, depth=8, content=b"")
    assert processor.header_tokens(good, field="") == processor.num_tokens(good, field="")
    for prompts, field in ([[good, cut]], "prompts[0].token_ids"), ([[good], [_REFUSED["gif"]]], "prompts[1].images[0]"):
        request = GenerateRequest(
            prompts=[Prompt(token_ids=[START, IMAGE, END] * len(own), images=own) for own in prompts], num_samples=1
        )
        with refusing(field):
            await prepared_images(request, model)


@pytest.mark.parametrize(
    "token_ids", [[1, 2], [START, IMAGE, END] * 2, [IMAGE, END], [START, IMAGE], [START, 1, IMAGE, END], [START, VIDEO, END]]
)
def test_placeholders_that_are_not_one_marked_for_each_image_are_refused(tmp_path: Path, token_ids: list[int]) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    with pytest.raises(InvalidArgument) as refused:
        processor.expand(token_ids, [_file(_SMALL)])
    assert refused.value.metadata["field"].startswith("prompt.token_ids")


@pytest.mark.parametrize(
    "settings",
    [
        {"patch_size": 14},
        {"merge_size": 4},
        {"temporal_patch_size": 1},
        {"do_resize": False},
        {"image_processor_type": "CLIPImageProcessor"},
        {"min_pixels": 10, "max_pixels": 9},
        {"min_pixels": "many"},
        {"size": {"height": 30, "width": 30}},
        {"size": "large"},
        {"image_std": [0, 1, 1]},
        {"image_mean": "none"},
        {"resample": 99},
        {"do_center_crop": True},
        {"rescale_factor": 0},
        {"crop_size": []},
    ],
)
def test_processor_that_does_not_fit_the_model_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with refusing("model.path"):
        ImageProcessor(_folder(tmp_path, settings=settings), _TOWER).expand([START, IMAGE, END], [_file(_SMALL)])


def test_folder_without_a_processor_is_refused_with_its_first_image(tmp_path: Path) -> None:
    (_folder(tmp_path, settings={}) / "preprocessor_config.json").unlink()
    processor = ImageProcessor(tmp_path, _TOWER)
    assert processor.places([1, 2], 0, field="prompt") == []
    beyond = ImageProcessor(tmp_path, _TOWER, vocab_size=VIDEO)
    assert (processor.placeholder_ids, beyond.placeholder_ids) == ([IMAGE, VIDEO], [IMAGE])
    with pytest.raises(InvalidArgument):
        processor.num_tokens(_file(_SMALL), field="image")


def test_placeholder_that_was_drawn_is_text_and_one_that_a_text_has_is_refused(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    drawn = [IMAGE, 7, START, IMAGE, END, 8, IMAGE, START, VIDEO, IMAGE, END, START]
    assert processor.places(drawn, 1, field="prompt") == [3]
    prepared = processor.expand(drawn, [_file(_SMALL)])
    assert (prepared.token_ids[:4], prepared.token_ids[-7:]) == (drawn[:4], drawn[-7:])
    assert [place for place, length in enumerate(prepared.lengths) if length > 1] == [3] and prepared.starts == [3]
    processor.check_rendered([7, START, IMAGE, END], 1, field="prompt")
    for token_ids, num_images in (
        ([7, IMAGE], 1),
        ([START, IMAGE, END, 7, IMAGE], 1),
        ([START, VIDEO, END], 1),
        ([7, VIDEO], 0),
    ):
        with refusing("prompt"):
            processor.check_rendered(token_ids, num_images, field="prompt")


def _samples(processor: ImageProcessor) -> tuple[list[bytes], list[TrainingSample]]:
    files = [_file(_picture(*edges, seed=seed)) for seed, edges in enumerate([(40, 56), (100, 70), (30, 30)])]
    named = [[0], [0], [], [1, 0], [2, 1]]
    samples = []
    for own in named:
        prompt = [7, *[START, IMAGE, END] * len(own), 8]
        images = [files[index] for index in own]
        digest = processor.expand(prompt, images).digest if own else b""
        samples.append(
            TrainingSample(prompt_token_ids=prompt, completion_token_ids=[9, IMAGE], images=images, image_digest=digest)
        )
    return files, samples


def test_trainer_decodes_each_distinct_image_once_and_a_rank_gets_it_once(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={"size": {"shortest_edge": 1024, "longest_edge": 16384}}), _TOWER)
    files, samples = _samples(processor)
    expanded = [processor.expand(sample.prompt_token_ids, sample.images) if sample.images else None for sample in samples]
    send_once(samples)
    decoded = decode_samples(samples, names=(), images=processor)
    prompts = [
        list(sample.prompt_token_ids) if one is None else one.token_ids for sample, one in zip(samples, expanded, strict=True)
    ]
    assert decoded.num_prompt_S.tolist() == list(map(len, prompts))
    assert decoded.token_ids_T.tolist() == [token for prompt in prompts for token in (*prompt, 9, IMAGE)]
    (whole,) = decode_parts(encode_parts(decoded, [range(5)]))
    images = whole.images
    assert images is not None
    assert images.num_images_S.tolist() == [1, 1, 0, 2, 2]
    assert images.image_I.tolist() == [0, 0, 1, 0, 2, 1]
    assert images.start_I.tolist() == [start for one in expanded if one is not None for start in one.starts]
    patches = [processor.patches(file, field="")[0] for file in files]
    np.testing.assert_array_equal(images.levels_PD, np.concatenate(patches))
    messages = encode_parts(decoded, [[2], [3], [1, 2], [0], []])  # an image of three micro-batches, and none
    assert sum(message.ByteSize() for message in messages) < sum(each.nbytes for each in patches[:2]) + 5000
    parts = decode_parts([type(message).FromString(message.SerializeToString()) for message in messages])
    batches = [token_batch(part, device=torch.device("cpu")) for part in parts]
    for batch, own in zip(batches, ([], [1, 0], [0], [0], []), strict=True):
        levels = [patches[index] for index in sorted(own)]
        assert (batch.images is None) is (not own)
        if batch.images is not None:
            np.testing.assert_array_equal(batch.images.levels_PD, np.concatenate(levels))
    assert decode_samples(samples[2:3], names=(), images=processor).images is None


def test_call_with_too_many_patches_is_refused_before_an_image_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    files, samples = _samples(processor)
    num_bytes = sum(processor.patches(file, field="")[0].nbytes for file in files)
    monkeypatch.setattr(requests, "MAX_PATCH_BYTES", num_bytes)
    assert decode_samples(samples, names=(), images=processor).images is not None
    cut = TrainingSample(
        prompt_token_ids=[START, IMAGE, END], completion_token_ids=[9], images=[_png(99, 99, depth=8, content=b"")]
    )
    with refusing("samples[].images"):
        decode_samples([*samples, cut], names=(), images=processor)


def test_image_in_a_completion_has_a_number_for_each_of_its_tokens_but_none_of_them_is_trained(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={"size": {"shortest_edge": 1024, "longest_edge": 16384}}), _TOWER)
    files = [_file(_picture(*edges)) for edges in ((40, 56), (100, 70))]
    turn = TrainingSample(
        prompt_token_ids=[7, START, IMAGE, END, START],
        completion_token_ids=[IMAGE, END, 5, IMAGE, 6],  # the second is drawn
        images=files,
        rollout_log_probs=[0, 0, -1, -2, -3],
        loss_mask=[0, 0, 1, 1, 1],
        policy_version=4,
        version_spans=[VersionSpan(num_tokens=3, policy_version=3), VersionSpan(num_tokens=2, policy_version=4)],
    )
    plain = TrainingSample(prompt_token_ids=[1, 2], completion_token_ids=[3, IMAGE], policy_version=4)
    plain.rollout_log_probs[:], plain.loss_mask[:] = [-4, -5], [1, 0]
    decoded = decode_samples([plain, turn], images=processor)
    one, two = (processor.num_tokens(file, field="") for file in files)
    assert (decoded.num_prompt_S.tolist(), decoded.num_completion_S.tolist()) == ([2, 4 + one], [2, 4 + two])
    expected = [1, 2, 3, IMAGE, 7, START, *[IMAGE] * one, END, START, *[IMAGE] * two, END, 5, IMAGE, 6]
    assert decoded.token_ids_T.tolist() == expected
    assert decoded.images is not None and decoded.images.start_I.tolist() == [2, 4 + one]
    assert decoded.columns["rollout_log_probs"].tolist() == [-4, -5, *[0] * two, 0, -1, -2, -3]
    assert decoded.columns["loss_mask"].tolist() == [1, 0, *[0] * two, 0, 1, 1, 1]
    assert decoded.columns["version_lag"].tolist() == [0, 0, *[1] * two, 1, 1, 0, 0]
    # The caller gets one number for an image.
    plan, scores = [[[1], [0]]], np.arange(6 + two, dtype=np.float32)
    rows = _rows_of([0, 1], plan, [[scores[2:].tobytes(), scores[:2].tobytes()]], samples=decoded)
    assert [row.tolist() for row in rows] == [[0, 1], [2, *range(2 + two, 6 + two)]]
    check_columns(decoded, config=LossConfig(loss=SftLoss()), role=Role.POLICY)
    turn.loss_mask[0] = 1
    with refusing("samples[1].loss_mask[0]"):
        check_columns(decode_samples([plain, turn], images=processor), config=LossConfig(loss=SftLoss()), role=Role.POLICY)


def test_trainer_refuses_images_that_differ_from_rollouts(tmp_path: Path) -> None:
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 16384}}
    processor = ImageProcessor(_folder(tmp_path, settings=settings), _TOWER)
    _, samples = _samples(processor)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**_SETTINGS, **settings, "image_std": [0.5, 0.5, 0.5]}))
    other = ImageProcessor(tmp_path, _TOWER)
    for index, field in ((0, "samples[0].image_digest"), (3, "samples[0].image_digest")):
        with refusing(field):
            decode_samples(samples[index : index + 1], names=(), images=other)
    samples[0].image_digest = b""
    assert decode_samples(samples[:1], names=(), images=other).images is not None


def test_trainer_refuses_images_of_a_text_model_and_placeholders_without_any(tmp_path: Path) -> None:
    processor = ImageProcessor(_folder(tmp_path, settings={}), _TOWER)
    _, samples = _samples(processor)
    with refusing("samples[1].images"):
        decode_samples(samples[2:4], names=())
    del samples[0].images[:]
    with refusing("samples[1].prompt_token_ids"):
        decode_samples(samples[2:3] + samples[:1], names=(), images=processor)
