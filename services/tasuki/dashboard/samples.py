"""A run's sample dump: its steps, the completions of one step, and one completion by token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any

from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.line_reader import LineReader
from tasuki.wire.regular_file import open_regular, read_regular, unreadable

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NAME = re.compile(r"step-(\d{6,15})\.jsonl")
_MAX_STEPS = 100_000
_MAX_BYTES, _MAX_LINES = 64_000_000, 10_000
_MAX_NAMES, _NAME_CHARS = 50, 200
"""Limits on names of a completion's rewards and fields."""
_SHOWN_CHARS = 600
_MAX_CHARS = 200_000
_MAX_TOKENS = 20_000
_NUMBERS = ("reward", "advantage", "log_prob_gap", "log_prob_gap_max", "temperature")


def list_steps(folder: Path | None) -> list[int]:
    """The newest 100,000 steps with samples, in order; empty without the folder. Raises InvalidArgument if it cannot be read."""
    if folder is None:
        return []
    try:
        with os.scandir(folder) as entries:
            matches = (_NAME.fullmatch(entry.name) for entry in entries)
            return sorted(nlargest(_MAX_STEPS, (int(found[1]) for found in matches if found)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidArgument("samples", f"{folder} cannot be read: {error.strerror}") from error


def read_step(folder: Path | None, step: int) -> dict[str, Any]:
    """The step's completions with shortened texts. Raises PathNotFound for a step without samples."""
    samples: list[dict[str, Any]] = []
    num_lines, is_cut = 0, False
    for line in _lines(folder, step):
        if line is None:
            is_cut = True
            break
        if (sample := _sample(line)) is not None:
            samples.append(_head(num_lines, sample))
        num_lines += 1
    return {"step": step, "samples": samples, "is_cut": is_cut, "num_bad_lines": num_lines - len(samples)}


def read_sample(folder: Path | None, step: int, index: int, *, token_text: Callable[[int], str | None]) -> dict[str, Any]:
    """One completion, up to 20,000 tokens. Raises PathNotFound, and InvalidArgument for an invalid line."""
    line = next(islice(_lines(folder, step), index, None), None)
    if line is None:
        raise PathNotFound(f"step {step} has no sample {index}; they are counted from 0", step=step)
    sample = _sample(line)
    if sample is None:
        raise InvalidArgument("sample", f"line {index + 1} of step {step} is not a sample")
    token_ids = [one for one in _list(sample, "token_ids") if isinstance(one, int)][:_MAX_TOKENS]
    return {
        **_head(index, sample, max_chars=_MAX_CHARS),
        "fields": {name: _text(value, _MAX_CHARS) for name, value in _table(sample, "fields").items()},
        "num_tokens": len(_list(sample, "token_ids")),
        "token_ids": token_ids,
        "tokens": [token_text(one) for one in token_ids],
        **{name: _numbers(sample, name, len(token_ids)) for name in ("rollout_log_probs", "trainer_log_probs", "advantages")},
    }


def _lines(folder: Path | None, step: int) -> Iterator[bytes | None]:
    """Lines of the step, without a last line that is still being written. None: there are more than are shown."""
    if folder is None:
        raise PathNotFound("the node has no run yet")
    path = folder / f"step-{step:06d}.jsonl"
    try:
        with open_regular(path) as file:
            reader, num_lines = LineReader(), 0
            for line in reader.lines(file):
                if num_lines == _MAX_LINES or reader.offset > _MAX_BYTES:
                    yield None
                    return
                if line:
                    yield line
                    num_lines += 1
    except FileNotFoundError as error:
        raise PathNotFound(f"step {step} has no samples", path=path) from error
    except OSError as error:
        raise InvalidArgument("samples", f"{path} cannot be read: {error.strerror}") from error


def _sample(line: bytes) -> dict[str, Any] | None:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return sample if isinstance(sample, dict) else None


def _head(index: int, sample: dict[str, Any], *, max_chars: int = _SHOWN_CHARS) -> dict[str, Any]:
    return {
        "index": index,
        "group": _whole(sample.get("group")),
        "sample": _whole(sample.get("sample")),
        "policy_version": _whole(sample.get("policy_version")),
        "prompt": _text(sample.get("prompt"), max_chars),
        "completion": _text(sample.get("completion"), max_chars),
        "finish_reason": _text(sample.get("finish_reason"), _SHOWN_CHARS),
        "rewards": {name: _number(value) for name, value in _table(sample, "rewards").items()},
        **{name: _number(sample.get(name)) for name in _NUMBERS},
    }


def _text(value: object, max_chars: int) -> str:
    """Converts a chat's messages, and anything else that is not text, to JSON."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair cannot be encoded.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None
    return number if number is not None and abs(number) != float("inf") and number == number else None


def _numbers(sample: dict[str, Any], name: str, count: int) -> list[float | None] | None:
    values: Sequence[object] = _list(sample, name)
    return [_number(value) for value in values[:count]] if values else None


def _list(sample: dict[str, Any], name: str) -> list[Any]:
    value = sample.get(name)
    return value if isinstance(value, list) else []


def _table(sample: dict[str, Any], name: str) -> dict[str, Any]:
    value = sample.get(name)
    entries = islice(value.items(), _MAX_NAMES) if isinstance(value, dict) else ()
    return {_text(key, _NAME_CHARS): one for key, one in entries}


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
