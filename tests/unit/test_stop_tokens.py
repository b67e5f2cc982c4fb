"""Stop tokens of a model folder, from any of its files that name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.rollout.stop_tokens import read_stop_token_ids
from tests.models import EOS, char_tokenizer

IM_END = {"content": "<|im_end|>", "special": True}


def folder_of(path: Path, **files: object) -> Path:
    for name, table in files.items():
        (path / f"{name}.json").write_text(json.dumps(table))
    return path


def test_all_that_any_file_names_are_stop_tokens(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [7, 9]},
        tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": IM_END}},
    )
    assert read_stop_token_ids(folder, vocab_size=10) == (5, 7, 9)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": IM_END}, "added_tokens": {"<|im_end|>": 5}},
        {"tokenizer_config": {"eos_token": IM_END}, "tokenizer": {"added_tokens": [{"id": 5, **IM_END}], "model": {}}},
        {"tokenizer_config": {"eos_token": IM_END}, "tokenizer": {"model": {"vocab": {"<|im_end|>": 5}}}},
        {"tokenizer_config": {"eos_token": "b"}, "tokenizer": {"model": {"vocab": [[c, 0.0] for c in "12345b"]}}},
        {"special_tokens_map": {"eos_token": IM_END}, "vocab": {"<|im_end|>": 5}},
    ],
)
def test_the_tokenizers_token_is_found_in_any_file_that_gives_its_id(files: dict[str, object], tmp_path: Path) -> None:
    assert read_stop_token_ids(folder_of(tmp_path, config={}, **files), vocab_size=10) == (5,)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    assert read_stop_token_ids(tmp_path, vocab_size=131) == (EOS,)
