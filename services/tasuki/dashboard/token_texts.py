"""Texts of single tokens from a tokenizer.json, without a tokenizer library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tasuki.wire.regular_file import read_regular, unreadable

_MAX_BYTES = 64_000_000
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Token texts of a model folder's tokenizer; empty without a readable tokenizer.json."""

    def __init__(self, model: Path | None) -> None:
        self._pieces: dict[int, str] = {}
        self._special: set[int] = set()
        self._is_byte_level = False
        self.problem = ""
        if model is not None:
            self._read(model / "tokenizer.json")

    def __call__(self, token_id: int) -> str | None:
        """Returns None for an unknown token. Bytes that are not text by themselves become U+FFFD."""
        piece = self._pieces.get(token_id)
        if piece is None or token_id in self._special:
            return piece
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES).decode(errors="replace")
        found = _BYTE.fullmatch(piece)
        return bytes([int(found[1], 16)]).decode(errors="replace") if found else piece.replace("\u2581", " ")

    def _read(self, path: Path) -> None:
        try:
            tokenizer = json.loads(read_regular(path, max_bytes=_MAX_BYTES))
            vocab = tokenizer["model"]["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((pair[0], index) for index, pair in enumerate(vocab))
            self._pieces = {int(index): str(piece) for piece, index in pairs}
            for token in tokenizer.get("added_tokens", ()):
                self._pieces[int(token["id"])] = str(token["content"])
                self._special.add(int(token["id"]))
            self._is_byte_level = _names_byte_level(tokenizer.get("decoder"))
        except OSError as error:
            self.problem = unreadable(path, error)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            self._pieces = {}
            self.problem = f"{path} cannot be read: {type(error).__name__}: {error}"


def _names_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_names_byte_level, decoder.get("decoders", ())))


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_char()
