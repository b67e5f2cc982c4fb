"""Images through a whole node: a small Qwen3-VL learns to name the color of pictures, which no text tells."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.conftest import ENVIRONMENT
from tests.extent import IS_WHOLE
from tests.models import TOWER

pytestmark = pytest.mark.timeout(600)
COLORS = {"r": (230, 30, 30), "g": (30, 230, 30), "b": (30, 30, 230)}
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<picture>", "</picture>", "<turn>")
TEMPLATE = (
    "{% for message in messages %}<turn>{% for part in message.content %}{% if part.type == 'image' %}<picture><image></picture>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}<turn>"
)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
NODE = """state_dir = "node"
device = "cpu"
model = {path = "model"}
trainer = {learning_rate = 3e-3, compute_dtype = "float32"}
rollout = {dtype = "float32", context_length = 128}
[train]
dataset = "train.jsonl"
eval_dataset = "eval.jsonl"
output_dir = "run"
num_steps = 40
prompts_per_step = 12
group_size = 8
max_new_tokens = 1
eval_every = 40
reward.function = "color_reward:named"
"""


def save_model(folder: Path, *, seed: int) -> None:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *"rgb?", *"acdefhijklmnopqstuvwxyz"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named).save_pretrained(folder)
    text = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }  # fmt: skip
    tower = TOWER | {"deepstack_visual_indexes": [0, 1]}
    tokens = {
        "image_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "video_token_id": 63,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)
    Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def write_rows(path: Path, num: int, random: np.random.Generator) -> None:
    rows: list[str] = []
    for index in range(num):
        answer = "rgb"[index % 3]
        noise = random.integers(-25, 25, (*random.integers(12, 48, 2), 3))
        picture = path.with_name(f"{path.stem}-{index}.png")
        Image.fromarray(np.clip(np.array(COLORS[answer]) + noise, 0, 255).astype(np.uint8)).save(picture)
        content = [{"type": "image", "path": picture.name}, {"type": "text", "text": "?"}]
        rows.append(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": answer}) + "\n")
    path.write_text("".join(rows))


def train(folder: Path, *settings: str, seed: int = 0) -> list[dict[str, Any]]:
    """Trains a new model. Returns the steps, of which engine and trainer agree in every token."""
    random = np.random.default_rng(seed)
    save_model(folder / "model", seed=seed)
    write_rows(folder / "train.jsonl", 96, random)
    write_rows(folder / "eval.jsonl", 24, random)
    (folder / "color_reward.py").write_text("def named(completion, answer, **_):\n    return float(completion[:1] == answer)\n")
    (folder / "node.toml").write_text(NODE)
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    command = [sys.executable, "-m", "tasuki.cli", "train", "node.toml", *overrides, "--set", f"seed={seed}"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["metrics"]["log_prob_gap_max"] for step in steps if "log_prob_gap_max" in step.get("metrics", {})]
    assert len(gaps) > 1 and max(gaps) < 1e-5
    return steps


@pytest.mark.parametrize("seed", range(3 if IS_WHOLE else 1))
def test_colors_of_pictures_are_learned(seed: int, tmp_path: Path) -> None:
    scores = [step["eval_score"] for step in train(tmp_path, seed=seed) if step.get("eval_score") is not None]
    assert scores[0] < 0.5 and scores[-1] >= 0.9, scores


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    train(tmp_path, "trainer.lora.rank=8", "trainer.lora.tower=true", "train.num_steps=4", "train.max_new_tokens=3")
    base, merged = (AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("model", "run/model"))
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "model" / "adapter")
    ids = torch.tensor([[*range(9, 25), 5, *[4] * 4, 6, 9]])
    pixels, grid = torch.randn(16, 3 * 2 * 4 * 4), torch.tensor([[1, 4, 4]])
    given: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 4).int(),
    }
    with torch.no_grad():
        found, expected = (model(**given).logits for model in (adapted, merged))
        with adapted.disable_adapter():
            start = adapted(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (start - expected).abs().max() > 1e-2
