"""Images of rows and of the wire: files by path, bytes and URL; each sent once."""

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasuki.client import encode, generation
from tasuki.client.dataset import read_jsonl
from tasuki.client.images import MAX_BYTES, MAX_IMAGES, images_of
from tasuki.client.types import FinishReason, Sample, SamplingParams, TrainingSample
from tasuki.v1.trainer_pb2 import TrainingSamples
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.images import Files, restore, send_once
from tests.refusal import refusing

FILE = b"\x89PNG" + bytes(range(60))


def _rows(path: Path, *parts: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}) + "\n")
    return path


def test_images_are_read_from_paths_of_the_datasets_folder_bytes_and_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b.png").write_bytes(FILE)
    parts = [
        {"type": "image", "path": "a b.png"},
        {"type": "image", "bytes": b64encode(FILE + b"1").decode()},
        {"type": "image", "bytes": f"data:image/png;base64,{b64encode(FILE + b'2').decode()}"},
        {"type": "image", "url": f"file://{tmp_path}/a%20b.png", "path": None},
    ]
    dataset = _rows(tmp_path / "rows.jsonl", *parts)
    (row,) = read_jsonl(dataset)
    monkeypatch.chdir("/")
    assert images_of(row["prompt"]) == [FILE, FILE + b"1", FILE + b"2", FILE]
    assert images_of("a text") == images_of([{"role": "user", "content": "a text"}]) == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "path": "a.png", "bytes": "AA=="},
        {"type": "image", "path": 3},
        {"type": "image", "url": "https://example.com/a.png"},
        {"type": "image", "url": "file://host/a.png"},
        {"type": "image", "url": "file://[a].png"},
        {"type": "image", "path": "a.png", "detail": "high"},
        {"type": "image_url", "image_url": "file:///a.png"},
    ],
)
def test_part_that_names_no_single_file_is_refused_by_line(tmp_path: Path, part: dict[str, Any]) -> None:
    dataset = _rows(tmp_path / "rows.jsonl", part)
    with pytest.raises(InvalidArgument) as refused:
        read_jsonl(dataset)
    assert refused.value.metadata["place"] == f"{dataset}:1"


def test_files_that_are_missing_too_many_or_too_large_are_refused(tmp_path: Path) -> None:
    def of(*parts: dict[str, Any]) -> list[bytes]:
        return images_of([{"role": "user", "content": list(parts)}])

    large = tmp_path / "large.png"
    large.write_bytes(bytes(MAX_BYTES))
    small = {"type": "image", "bytes": "AAAA"}
    assert len(of({"type": "image", "path": str(large)})) == 1
    assert len(of(*[small] * MAX_IMAGES)) == MAX_IMAGES
    for parts in (
        [{"type": "image", "path": str(large)}, small],
        [small] * (MAX_IMAGES + 1),
        [{"type": "image", "path": str(tmp_path / "none.png")}],
        [{"type": "image", "path": str(tmp_path)}],
        [{"type": "image", "bytes": "?"}],
    ):
        with pytest.raises(InvalidArgument):
            of(*parts)


def test_request_carries_the_images_of_each_prompt() -> None:
    params = SamplingParams(max_new_tokens=4)
    ((_, request),) = generation.requests([[1, 2], [3]], params, num_samples=2, images=[[FILE, FILE], []])
    assert [list(prompt.images) for prompt in request.prompts] == [[FILE, FILE], []]
    for images in ([[FILE]], [FILE, FILE], [["text"], []]):
        with pytest.raises(InvalidArgument) as refused:
            generation.requests([[1, 2], [3]], params, num_samples=2, images=images)
        assert "images" in refused.value.metadata["field"]


def _drawn(*images: bytes, prompt: Sequence[int] = (1,)) -> Sample:
    token_ids, log_probs = np.array([5], np.int32), np.array([-1.0], np.float32)
    given = {"prompt_token_ids": np.array(prompt, np.int32), "images": images, "image_digest": b"d" * 32}
    return Sample(0, 0, token_ids, log_probs, FinishReason.STOP, 3, **given)


def _sample(*images: bytes) -> TrainingSample:
    return TrainingSample.of(_drawn(*images))


def test_call_carries_each_file_once_however_it_is_cut_into_messages() -> None:
    large = FILE * 20_000  # more than a message's usual size
    samples = [_sample(large), _sample(FILE, large), _sample(large, FILE), _sample(), _sample(large)]
    chunks = encode.training_chunks(samples)
    assert sum(chunk.ByteSize() for chunk in chunks) < len(large) + 1000
    received = [sample for chunk in chunks for sample in TrainingSamples.FromString(chunk.SerializeToString()).samples]
    files = Files()
    assert [files.of(one, field="sample") for one in received] == [list(one.images) for one in samples]
    restore(received)
    assert [list(encode.training_sample_from_proto(one).images) for one in received] == [list(one.images) for one in samples]
    send_once(received[1:])
    send_once(received[1:])  # as for a share that is sent again
    assert [len(one.images[0]) for one in received if one.images] == [len(large), len(FILE), 32, 32]
    with refusing("samples[0].images[0]"):
        restore(received[2:])


def test_turns_keep_their_images_and_refuse_others() -> None:
    def joined(*second: bytes) -> TrainingSample:
        return TrainingSample.of_turns([[1, 2], _drawn(FILE, prompt=[1, 2]), [7], _drawn(*second, prompt=[1, 2, 5, 7])])

    assert (joined(FILE).images, joined(FILE).image_digest) == ([FILE], b"d" * 32)
    assert joined(FILE, FILE + b"1").images == [FILE, FILE + b"1"]
    for other in ((), (FILE + b"1", FILE)):
        with refusing("turns[3]"):
            joined(*other)
