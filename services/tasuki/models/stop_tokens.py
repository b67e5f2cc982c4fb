"""Stop tokens from the files of a model folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tasuki.models.config_json import read_json_object
from tasuki.models.tokenizer import TOKENIZER_FILE, read_tokenizer
from tasuki.wire.errors import InvalidArgument

_log = logging.getLogger(__name__)


def read_stop_token_ids(folder: Path, *, vocab_size: int | None) -> tuple[int, ...]:
    """Returns the end-of-sequence token ids of config.json, generation_config.json and the tokenizer, ascending.

    Logs and skips ids outside the vocabulary. Raises InvalidArgument for a file that is not JSON, and as read_tokenizer.
    """
    found = set[int]()
    for file in _files(folder):
        table = read_json_object(file, field="model.path")
        for each in (table, table.get("text_config")):
            if isinstance(each, dict):
                found |= _ids(each.get("eos_token_id"), file)
    if (folder / TOKENIZER_FILE).exists() and (own := read_tokenizer(folder).eos_token_id) is not None:
        found.add(own)
    limit = max(found, default=0) + 1 if vocab_size is None else vocab_size
    for token_id in sorted(found - set(range(limit))):
        _log.warning("event=eos_token_outside_vocabulary token_id=%d vocab_size=%d path=%s", token_id, limit, folder)
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < limit))


def _files(folder: Path) -> list[Path]:
    return [file for name in ("config.json", "generation_config.json") if (file := folder / name).is_file()]


def _ids(value: object, file: Path) -> set[int]:
    """Parses an `eos_token_id`: a number, a list of numbers, or nothing."""
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in values if not isinstance(one, int) or isinstance(one, bool)]:
        raise InvalidArgument("model.path", f"{file}: eos_token_id has {wrong[0]!r}, which is no token id; give whole numbers")
    return set(values)
