"""Stop tokens from the files of a model folder: the engine runs without a tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasuki.wire.errors import UnsupportedModel

_log = logging.getLogger(__name__)


def read_stop_token_ids(folder: Path, *, vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-sequence token ids of config.json, generation_config.json and the tokenizer, ascending.

    Logs and skips a tokenizer's token without an id, and ids outside the vocabulary.
    Raises UnsupportedModel for a file that is not JSON.
    """
    config = _table(folder / "config.json")
    named = [config, config.get("text_config") or {}, _table(folder / "generation_config.json")]
    found = {token_id for table in named for token_id in _ids(table.get("eos_token_id"))}
    token = _tokenizer_eos(folder)
    if token is not None:
        token_id = _id_of(token, folder)
        if token_id is None:
            _log.warning("event=eos_token_unknown token=%r path=%s effect=it_ends_no_completion", token, folder)
        else:
            found.add(token_id)
    for token_id in sorted(found - set(range(vocab_size))):
        _log.warning("event=eos_token_outside_vocabulary token_id=%d vocab_size=%d path=%s", token_id, vocab_size, folder)
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < vocab_size))


def _table(file: Path) -> dict[str, Any]:
    """Reads the JSON object in `file`; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"model.path: {file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise UnsupportedModel(f"model.path: {file} is not a JSON object")
    return table


def _ids(value: object) -> list[int]:
    """Parses an `eos_token_id`: a number, a list of numbers, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int)]


def _tokenizer_eos(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _content(_table(folder / name).get("eos_token"))
        if token is not None:
            return token
    return None


def _content(token: object) -> str | None:
    """The text of a token, stored as a string or in an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _id_of(token: str, folder: Path) -> int | None:
    for tokens in _token_tables(folder):
        token_id = tokens.get(token)
        if isinstance(token_id, int):
            return token_id
    return None


def _token_tables(folder: Path) -> Iterator[Mapping[str, object]]:
    """Yields tables of token -> id, small ones first."""
    listed = _table(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    yield {_content(token) or "": int(token_id) for token_id, token in listed.items() if token_id.isdecimal()}
    yield _table(folder / "added_tokens.json")
    tokenizer = _table(folder / "tokenizer.json")
    yield {_content(token) or "": token.get("id") for token in tokenizer.get("added_tokens") or ()}
    vocabulary: Any = (tokenizer.get("model") or {}).get("vocab") or {}
    # A unigram model has a list of pieces with scores, in order of their ids.
    yield vocabulary if isinstance(vocabulary, dict) else {piece: index for index, (piece, _) in enumerate(vocabulary)}
    yield _table(folder / "vocab.json")
