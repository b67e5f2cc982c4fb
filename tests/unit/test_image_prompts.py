"""Rows with images as token ids: one placeholder each by the model's template, and refusals by row."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from tasuki.client.images import images_of
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.models import make_model, save_checkpoint
from tests.unit.small_tokenizers import SPECIAL, trained, write_folder

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS_ALONE = _TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")


def _tokenizer(tmp_path: Path, template: str = _TEMPLATE, kind: str = "qwen3_vl") -> tuple[ModelTokenizer, Tokenizer]:
    """Of a folder whose config.json has the tokenizer's own ids of the marks."""
    folder = save_checkpoint(make_model(kind, seed=1), tmp_path / "model")
    own = trained("bytes", [*SPECIAL, *MARKS])
    config = json.loads((folder / "config.json").read_text())
    if kind == "qwen3_vl":
        start, image, end = (own.token_to_id(mark) for mark in MARKS)
        config |= {"vision_start_token_id": start, "image_token_id": image, "vision_end_token_id": end}
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
    with pytest.raises(InvalidArgument):
        tokenizer.encode_chat([*_chat(image), {"role": "assistant", "content": "two"}])


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
