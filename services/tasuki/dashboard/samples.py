"""A run's sample dump: its steps, the completions of one step, one completion by token, and two evaluations side by side."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import islice, zip_longest
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
_SHOWN_CHARS, _ROW_CHARS = 600, 2_000
_MAX_ROWS, _MAX_MESSAGES = 1_000, 200
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


def read_step(folder: Path | None, step: int, *, contains: str = "") -> dict[str, Any]:
    """The step's completions with shortened texts, and the rewards of all. Raises PathNotFound for a step without samples.

    contains: what prompt or completion must contain, in any case.
    """
    samples: list[dict[str, Any]] = []
    rewards: list[dict[str, float | None]] = []
    num_lines, is_cut = 0, False
    for line in _lines(folder, step):
        if line is None:
            is_cut = True
            break
        if (sample := _sample(line)) is not None:
            head = _head(num_lines, sample)
            rewards.append({"": head["reward"], **head["rewards"]})
            texts = (_text(sample.get("prompt"), _MAX_CHARS), _text(sample.get("completion"), _MAX_CHARS))
            if "completion" in sample and contains.lower() in "\n".join(texts).lower():
                samples.append(head)
        num_lines += 1
    num_bad_lines = num_lines - len(rewards)
    return {"step": step, "samples": samples, "rewards": rewards, "is_cut": is_cut, "num_bad_lines": num_bad_lines}


def compare(folder: Path | None, before: int, after: int) -> dict[str, Any]:
    """Held-out rows of two evaluations: mean reward and first completion in both. Raises as read_step.

    Rows whose reward changed come first, the largest change before. counts: rows that got better, worse or neither.
    """
    (old, _), (new, is_cut) = _rows(folder, before), _rows(folder, after)
    both = [(row, old[row], new[row]) for row in new if row in old]
    changes = {row: (is_["reward"] or 0.0) - (was["reward"] or 0.0) for row, was, is_ in both}
    counts = {"better": sum(one > 0 for one in changes.values()), "worse": sum(one < 0 for one in changes.values())}
    both.sort(key=lambda one: -abs(changes[one[0]]))
    shown = [
        {"row": row, "change": changes[row], "was": was, "is": is_}
        for row, was, is_ in both
        if changes[row] or is_["completion"]
    ]
    counts["same"] = len(both) - counts["better"] - counts["worse"]
    return {"counts": counts, "rows": shown[:_MAX_ROWS], "num_rows": len(new), "is_cut": is_cut or len(shown) > _MAX_ROWS}


def _rows(folder: Path | None, step: int) -> tuple[dict[int, dict[str, Any]], bool]:
    """The rows of an evaluation by number, and whether there are more."""
    rows: dict[int, dict[str, Any]] = {}
    rewards: dict[int, list[float]] = {}
    for line in _lines(folder, step):
        if line is None:
            return rows, True
        if (sample := _sample(line)) is None or (row := _whole(sample.get("group"))) is None:
            continue
        head = _head(0, sample, max_chars=_ROW_CHARS)
        rewards.setdefault(row, []).extend([] if head["reward"] is None else [head["reward"]])
        rows.setdefault(row, {name: head[name] for name in ("prompt", "completion", "finish_reason", "rewards")})
        rows[row]["reward"] = sum(rewards[row]) / len(rewards[row]) if rewards[row] else None
    return rows, False


def read_sample(folder: Path | None, step: int, index: int, *, token_text: TokenTexts) -> dict[str, Any]:
    """One completion, up to 20,000 tokens. Raises PathNotFound, and InvalidArgument for an invalid line."""
    line = next(islice(_lines(folder, step), index, None), None)
    if line is None:
        raise PathNotFound(f"step {step} has no sample {index}; they are counted from 0", step=step)
    sample = _sample(line)
    if sample is None:
        raise InvalidArgument("sample", f"line {index + 1} of step {step} is not a sample")
    token_ids = [one for one in _list(sample, "token_ids") if isinstance(one, int)][:_MAX_TOKENS]
    is_masked = [value == 0 for value in _list(sample, "loss_mask")[: len(token_ids)]]
    return {
        **_head(index, sample, max_chars=_MAX_CHARS),
        "messages": _messages(sample.get("prompt")),
        "templated": token_text.joined(_list(sample, "prompt_token_ids")[:_MAX_TOKENS]),
        "fields": {name: _text(value, _MAX_CHARS) for name, value in _table(sample, "fields").items()},
        "num_tokens": len(_list(sample, "token_ids")),
        "token_ids": token_ids,
        "tokens": [token_text(one) for one in token_ids],
        "is_masked": is_masked,
        **{
            name: _numbers(sample, name, is_masked, len(token_ids))
            for name in ("rollout_log_probs", "trainer_log_probs", "advantages")
        },
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


def _messages(prompt: object) -> list[dict[str, str]] | None:
    """The role and content of a chat's messages; None for another prompt."""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(one, dict) and "role" in one for one in prompt):
        return None
    return [
        {
            "role": _plain(one["role"], _NAME_CHARS),
            # Besides the text, a message may call tools or name them.
            "content": _plain(one.get("content"), _MAX_CHARS),
            "others": _plain(
                {name: value for name, value in one.items() if name not in ("role", "content")} or None, _MAX_CHARS
            ),
        }
        for one in prompt[:_MAX_MESSAGES]
    ]


def _text(value: object, max_chars: int) -> str:
    """Converts a chat to lines of its messages, and anything else that is not text to JSON."""
    if messages := _messages(value):
        return _plain("\n".join(f"{one['role']}: {one['content']}{one['others']}" for one in messages), max_chars)
    return _plain(value, max_chars)


def _plain(value: object, max_chars: int) -> str:
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


def _numbers(sample: dict[str, Any], name: str, is_masked: Sequence[bool], count: int) -> list[float | None] | None:
    """None for a token that was not drawn."""
    pairs = zip_longest(_list(sample, name)[:count], is_masked)
    return [None if masked else _number(value) for value, masked in pairs] if _list(sample, name) else None


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
            return _bytes_of(piece).decode(errors="replace")
        found = _BYTE.fullmatch(piece)
        return bytes([int(found[1], 16)]).decode(errors="replace") if found else piece.replace("\u2581", " ")

    def joined(self, token_ids: Sequence[object]) -> str:
        """Text of tokens in a row; characters may span tokens."""
        pieces = [(one, self._pieces.get(one, f"\u27e8{one}\u27e9")) for one in token_ids if isinstance(one, int)]
        if not self._is_byte_level:
            return "".join(self(one) or piece for one, piece in pieces)
        parts = (
            piece.encode(errors="replace") if one in self._special or one not in self._pieces else _bytes_of(piece)
            for one, piece in pieces
        )
        return b"".join(parts).decode(errors="replace")

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


def _bytes_of(piece: str) -> bytes:
    return bytes(_BYTES[char] for char in piece if char in _BYTES)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_char()
