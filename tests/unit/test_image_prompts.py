"""Rows with images as token ids: one placeholder each by the model's template, and refusals by row."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from tasuki.client import encode
from tasuki.client.images import images_of
from tasuki.client.sft_data import read_sft_jsonl
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.models import make_model, save_checkpoint
from tests.unit.small_tokenizers import SPECIAL, trained, write_folder

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
VIDEO = "<|video_pad|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS_ALONE = _TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")


def _tokenizer(tmp_path: Path, template: str = _TEMPLATE, kind: str = "qwen3_vl") -> tuple[ModelTokenizer, Tokenizer]:
    """Of a folder whose config.json has the tokenizer's own ids of the marks."""
    folder = save_checkpoint(make_model(kind, seed=1), tmp_path / "model")
    own = trained("bytes", [*SPECIAL, *MARKS, VIDEO])
    config = json.loads((folder / "config.json").read_text())
    if kind == "qwen3_vl":
        start, image, end = (own.token_to_id(mark) for mark in MARKS)
        config |= {"vision_start_token_id": start, "image_token_id": image, "vision_end_token_id": end}
        config["video_token_id"] = own.token_to_id(VIDEO)
        config["text_config"]["vocab_size"] = 1000
        settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096}
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **settings})
        )
    else:
        config["vocab_size"] = 1000
    write_folder(folder, own, config=config, tokenizer_config={"chat_template": template})
    return ModelTokenizer(folder), own


def _image(tmp_path: Path, width: int = 40, height: int = 24) -> dict[str, Any]:
    content = BytesIO()
    Image.new("RGB", (width, height), "red").save(content, "PNG")
    path = tmp_path / f"{width}x{height}.png"
    path.write_bytes(content.getvalue())
    return {"type": "image", "path": str(path)}


def _chat(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def test_prompt_has_a_placeholder_for_each_image_and_counts_its_tokens(tmp_path: Path) -> None:
    tokenizer, own = _tokenizer(tmp_path)
    prompt = _chat("how many", _image(tmp_path), "apples", _image(tmp_path, 64, 64), "?")
    ids = tokenizer.encode_prompt(prompt)
    mark = "".join(MARKS)
    text = f"<|im_start|>user\nhow many{mark}apples{mark}?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == own.encode(text, add_special_tokens=False).ids
    assert tokenizer.num_prompt_tokens(prompt) == len(ids) - 2 + 5 * 3 + 8 * 8
    assert tokenizer.num_prompt_tokens("how many") == len(tokenizer.encode_prompt("how many"))
    assert len(images_of(prompt)) == 2


def test_placeholders_that_no_image_stands_for_are_refused(tmp_path: Path) -> None:
    tokenizer, _ = _tokenizer(tmp_path)
    image = _image(tmp_path)
    for prompt in ("how <|image_pad|>", _chat("<|image_pad|>"), _chat("".join(MARKS), image), _chat(image, "<|image_pad|>")):
        with pytest.raises(InvalidArgument):
            tokenizer.encode_prompt(prompt)
    answer = {"role": "assistant", "content": "two"}
    for chat in ([*_chat("<|image_pad|>"), answer], [*_chat(image), {**answer, "content": "<|video_pad|>"}]):
        with pytest.raises(InvalidArgument):
            tokenizer.encode_chat(chat)
        with pytest.raises(InvalidArgument):
            tokenizer.encode_next([*_chat(image), answer, *chat], 1, {}, last_token_id=None)


def test_image_that_the_template_or_the_model_does_not_read_is_refused(tmp_path: Path) -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    for name, template, kind in (("a", _TEXTS_ALONE, "qwen3_vl"), ("b", chatml, "qwen3_vl"), ("c", _TEMPLATE, "qwen3")):
        (tmp_path / name).mkdir()
        tokenizer, _ = _tokenizer(tmp_path / name, template, kind)
        assert tokenizer.encode_prompt(_chat("how many"))
        for parts in ([_image(tmp_path), "how many"], [_image(tmp_path)]):
            with pytest.raises(InvalidArgument):
                tokenizer.encode_prompt(_chat(*parts))


def test_broken_image_is_named_by_its_place(tmp_path: Path) -> None:
    tokenizer, _ = _tokenizer(tmp_path)
    whole = _image(tmp_path)
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(whole["path"]).read_bytes()[:40])
    with pytest.raises(InvalidArgument, match="image 1"):
        tokenizer.num_prompt_tokens(_chat(whole, {"type": "image", "path": str(broken)}))


def test_supervised_chat_has_the_images_before_its_last_answer_and_learns_none_of_their_tokens(tmp_path: Path) -> None:
    tokenizer, own = _tokenizer(tmp_path)
    image, other = _image(tmp_path), _image(tmp_path, 64, 64)
    (tmp_path / "rows").mkdir()
    relative = {"type": "image", "path": f"../{Path(image['path']).name}"}
    answer, asks = {"role": "assistant", "content": "two"}, _chat("how many", relative)
    rows = [
        {"messages": [*asks, answer, *_chat(other, relative), answer, *_chat(other)]},
        {"prompt": asks, "completion": "two"},
        {"messages": [*_chat("how"), answer]},
    ]
    dataset = tmp_path / "rows" / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_sft_jsonl(dataset, tokenizer, max_tokens=200)
    files = [Path(one["path"]).read_bytes() for one in (image, other)]
    assert [list(one.images) for one in (first, second, third)] == [[files[0], files[1], files[0]], [files[0]], []]
    placeholder = own.token_to_id(MARKS[1])
    for sample, num_images in ((first, 3), (second, 1), (third, 0)):
        ids = np.concatenate([sample.prompt_token_ids, sample.completion_token_ids])
        assert np.sum(ids == placeholder) == num_images == len(sample.images)
        learned = np.asarray(sample.completion_token_ids)[np.asarray(sample.loss_mask) > 0]
        assert set(own.decode(learned.tolist(), skip_special_tokens=False).split("<|im_end|>")) <= {"two", "\ntwo", "\n"}
    num_tokens = len(first.prompt_token_ids) + len(first.completion_token_ids) + 2 * (5 * 3 - 1) + (8 * 8 - 1)
    assert len(read_sft_jsonl(dataset, tokenizer, max_tokens=num_tokens)) == 3
    with pytest.raises(InvalidArgument, match="rows.jsonl:1"):
        read_sft_jsonl(dataset, tokenizer, max_tokens=num_tokens - 1)
    for wrong in (_chat({"type": "image", "path": "none.png"}), [{"role": "assistant", "content": [image]}]):
        dataset.write_text(json.dumps({"messages": [*wrong, answer]}) + "\n")
        with pytest.raises(InvalidArgument, match="rows.jsonl:1"):
            read_sft_jsonl(dataset, tokenizer, max_tokens=200)
    Path(image["path"]).unlink()
    with pytest.raises(InvalidArgument, match="image 0"):
        encode.training_chunks([second])
