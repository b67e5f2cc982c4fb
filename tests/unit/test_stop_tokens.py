"""Stop tokens of a model folder, from any of its files that name them."""

from __future__ import annotations

import json
from pathlib import Path

from tasuki.models.stop_tokens import read_stop_token_ids
from tests.models import EOS, char_tokenizer


def test_all_that_any_file_names_are_stop_tokens(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, True, 999]}))
    assert read_stop_token_ids(tmp_path, vocab_size=131) == (EOS, 7, 8, 9)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    assert read_stop_token_ids(tmp_path, vocab_size=131) == (EOS,)
