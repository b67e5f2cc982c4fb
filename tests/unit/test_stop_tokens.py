"""Stop tokens of a model folder, from any of its files that name them."""

import json
from pathlib import Path

import pytest

from tasuki.models.tokenizer import read_stop_token_ids
from tasuki.wire.errors import InvalidArgument
from tests.models import EOS, char_tokenizer


def test_all_that_any_file_names_are_stop_tokens(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 999]}))
    assert read_stop_token_ids(tmp_path, vocab_size=131) == (EOS, 7, 8, 9)


@pytest.mark.parametrize("value", ["5", 2.0, True, [[2]], [3, None], {"a": 1}])
def test_what_is_no_token_id_is_refused_by_its_file(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InvalidArgument, match=r"generation_config.json: eos_token_id has"):
        read_stop_token_ids(tmp_path, vocab_size=131)


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(InvalidArgument, match="config.json begins with a byte-order mark"):
        read_stop_token_ids(tmp_path, vocab_size=131)
