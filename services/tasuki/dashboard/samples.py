"""A run's sample dump: its steps, the completions of one step, one completion by token, and two evaluations side by side."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tasuki.client.images import MAX_BYTES, image_parts, read_image
from tasuki.dashboard.places import MALFORMED, problem_of
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.line_reader import LineReader
from tasuki.wire.regular_file import open_regular, read_regular

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NAME = re.compile(r"step-(\d{6,15})\.jsonl")
_MAX_BYTES, _MAX_LINES = 64_000_000, 10_000
_SHOWN_CHARS, _ROW_CHARS, _MAX_CHARS = 600, 2_000, 200_000
_MAX_ROWS, _MAX_TOKENS = 1_000, 20_000
_NUMBERS = ("reward", "advantage", "log_prob_gap", "log_prob_gap_max", "temperature")
_PICTURES = {"image/png": rb"\x89PNG\r\n\x1a\n", "image/jpeg": rb"\xff\xd8\xff", "image/webp": rb"RIFF....WEBP"}
"""Content types, and the first bytes of such files."""
_PLAIN = ("group", "sample", "policy_version", "finish_reason")


def list_steps(folder: Path | None) -> list[int]:
    """The steps with samples, in order; empty without the folder. Raises InvalidArgument if it cannot be read."""
    try:
        names = [] if folder is None else os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidArgument("samples", f"{folder} cannot be read: {error.strerror}") from error
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


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
        num_lines += 1
        try:
            sample = json.loads(line)
            head = _head(num_lines - 1, sample)
            texts = f"{_text(sample.get('prompt'))}\n{_text(sample.get('completion'))}"
        except MALFORMED:
            continue
        rewards.append({"": head["reward"], **head["rewards"]})
        if "completion" in sample and contains.lower() in texts.lower():
            samples.append(head)
    num_bad_lines = num_lines - len(rewards)
    return {"step": step, "samples": samples, "rewards": rewards, "is_cut": is_cut, "num_bad_lines": num_bad_lines}


def compare(folder: Path | None, before: int, after: int) -> dict[str, Any]:
    """Held-out rows of two evaluations: mean reward and first completion in both. Raises as read_step.

    Rows whose reward changed come first, the largest change before. counts: rows that got better, worse or neither.
    """
    (old, _), (new, is_cut) = _rows(folder, before), _rows(folder, after)
    both: list[dict[str, Any]] = [{"row": row, "was": old[row], "is": new[row]} for row in new if row in old]
    for one in both:  # without a change where all rewards failed
        was, now = one["was"]["reward"], one["is"]["reward"]
        one["change"] = 0.0 if was is None or now is None else now - was
    counts = {"better": sum(one["change"] > 0 for one in both), "worse": sum(one["change"] < 0 for one in both)}
    counts["same"] = len(both) - counts["better"] - counts["worse"]
    both.sort(key=lambda one: -abs(one["change"]))
    shown = [one for one in both if one["change"] or one["is"]["completion"]]
    return {"counts": counts, "rows": shown[:_MAX_ROWS], "num_rows": len(new), "is_cut": is_cut or len(shown) > _MAX_ROWS}


def _rows(folder: Path | None, step: int) -> tuple[dict[int, dict[str, Any]], bool]:
    """The rows of an evaluation by number, and whether there are more."""
    rows: dict[int, dict[str, Any]] = {}
    rewards: dict[int, list[float]] = {}
    for line in _lines(folder, step):
        if line is None:
            return rows, True
        try:
            head = _head(0, json.loads(line), max_chars=_ROW_CHARS)
            row = int(head["group"])
        except MALFORMED:
            continue
        known = rewards.setdefault(row, [])
        known += [] if head["reward"] is None else [head["reward"]]
        rows.setdefault(row, {name: head[name] for name in ("prompt", "completion", "finish_reason", "rewards")})
        rows[row]["reward"] = sum(known) / len(known) if known else None
    return rows, False


def read_sample(folder: Path | None, step: int, index: int, *, token_text: "TokenTexts") -> dict[str, Any]:
    """One completion, up to 20,000 tokens. Raises PathNotFound, and InvalidArgument for an invalid line."""
    line = _line(folder, step, index)
    try:
        sample = json.loads(line)
        token_ids = [int(one) for one in sample.get("token_ids", ())]
        shown_ids = token_ids[:_MAX_TOKENS]
        mask = sample.get("loss_mask") or [1] * len(token_ids)
        return {
            **_head(index, sample, max_chars=_MAX_CHARS),
            "messages": _messages(sample.get("prompt")),
            "num_images": len(image_parts(sample.get("prompt"))),
            "templated": token_text.joined(sample.get("prompt_token_ids", ())[:_MAX_TOKENS]),
            "fields": {name: _text(value) for name, value in sample.get("fields", {}).items()},
            "version_spans": [[int(number) for number in span] for span in sample.get("version_spans") or ()],
            "failure": _text(sample.get("failure") or ""),
            "num_tokens": len(token_ids),
            "token_ids": shown_ids,
            "tokens": [token_text(one) for one in shown_ids],
            "is_masked": [not is_drawn for is_drawn in mask[:_MAX_TOKENS]],
            # None for a token that was not drawn.
            **{
                name: [value if is_drawn else None for value, is_drawn in zip(sample[name], mask, strict=True)][:_MAX_TOKENS]
                if sample.get(name)
                else None
                for name in ("rollout_log_probs", "trainer_log_probs", "advantages")
            },
        }
    except MALFORMED as error:
        raise InvalidArgument("sample", f"line {index + 1} of step {step} is not a sample: {error}") from error


def read_picture(folder: Path | None, step: int, index: int, place: int) -> tuple[str, bytes]:
    """Content type and bytes of an image of a sample's prompt. Raises as read_sample, also for a file that does not begin as an image."""
    try:
        part = image_parts(json.loads(_line(folder, step, index)).get("prompt"))[place]
        content = read_image(part, place)
    except (OSError, *MALFORMED) as error:
        raise InvalidArgument("image", f"image {place} of sample {index} of step {step} cannot be read: {error}") from error
    kinds = [kind for kind, start in _PICTURES.items() if re.match(start, content, re.DOTALL)]
    if not kinds or len(content) > MAX_BYTES:
        raise InvalidArgument(
            "image", f"image {place} of sample {index} of step {step} is no PNG, JPEG or WebP of {MAX_BYTES} bytes"
        )
    return kinds[0], content


def _line(folder: Path | None, step: int, index: int) -> bytes:
    line = next(islice(_lines(folder, step), index, None), None)
    if line is None:
        raise PathNotFound(f"step {step} has no sample {index}; they are counted from 0", step=step)
    return line


def _lines(folder: Path | None, step: int) -> Iterator[bytes | None]:
    """Lines of the step, without a last line that is still being written. None: there are more than are shown."""
    if folder is None:
        raise PathNotFound("the node has no run yet")
    path = folder / f"step-{step:06d}.jsonl"
    try:
        with open_regular(path) as file:
            reader = LineReader()
            for number, line in enumerate(filter(None, reader.lines(file))):
                if number == _MAX_LINES or reader.offset > _MAX_BYTES:
                    yield None
                    return
                yield line
    except FileNotFoundError as error:
        raise PathNotFound(f"step {step} has no samples", path=path) from error
    except OSError as error:
        raise InvalidArgument("samples", f"{path} cannot be read: {error.strerror}") from error


def _head(index: int, sample: dict[str, Any], *, max_chars: int = _SHOWN_CHARS) -> dict[str, Any]:
    return {
        "index": index,
        **{name: sample.get(name, "" if name == "finish_reason" else None) for name in _PLAIN},
        "prompt": _text(sample.get("prompt"), max_chars),
        "completion": _text(sample.get("completion"), max_chars),
        "rewards": {name: None if value is None else float(value) for name, value in sample.get("rewards", {}).items()},
        **{name: None if sample.get(name) is None else float(sample[name]) for name in _NUMBERS},
    }


def _messages(prompt: object) -> list[dict[str, str]] | None:
    """The role and content of a chat's messages, and what else they have, such as calls of tools; None for another prompt."""
    if not isinstance(prompt, list) or not all(isinstance(one, dict) and "role" in one for one in prompt):
        return None
    return [
        {
            "role": _text(one["role"]),
            "content": _text(_shown(one.get("content"))),
            "others": _text({name: value for name, value in one.items() if name not in ("role", "content")} or None),
        }
        for one in prompt
    ]


def _shown(content: object) -> object:
    """The content with texts of its parts joined, and images named."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    parts = ["[image]" if part.get("type") == "image" else part.get("text") for part in content]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else content


def _text(value: object, max_chars: int = _MAX_CHARS) -> str:
    """Converts a chat to lines of its messages, and anything else that is not text to JSON."""
    if messages := _messages(value):
        value = "\n".join(f"{one['role']}: {one['content']}{one['others']}" for one in messages)
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


class TokenTexts:
    """Token texts of a model folder's tokenizer; empty without a readable tokenizer.json."""

    def __init__(self, model: Path | None) -> None:
        self._pieces: dict[int, str] = {}
        self._special: set[int] = set()
        self._is_byte_level = False
        self.problem = ""
        if model is None:
            return
        path = model / "tokenizer.json"
        try:
            tokenizer = json.loads(read_regular(path, max_bytes=_MAX_BYTES))
            vocab = tokenizer["model"]["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((pair[0], index) for index, pair in enumerate(vocab))
            pieces = {int(index): str(piece) for piece, index in pairs}
            added = {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens", ())}
            decoder = tokenizer.get("decoder") or {}
            self._is_byte_level = any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))
            self._pieces, self._special = pieces | added, set(added)
        except (OSError, *MALFORMED) as error:
            self.problem = problem_of(path, error)

    def __call__(self, token_id: int) -> str | None:
        """Returns None for an unknown token. Bytes that are not text by themselves become U+FFFD."""
        if token_id not in self._pieces:
            return None
        return self._bytes(token_id).decode(errors="replace")

    def joined(self, token_ids: Sequence[int]) -> str:
        """Text of tokens in a row; characters may span tokens."""
        return b"".join(map(self._bytes, token_ids)).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id, f"\u27e8{token_id}\u27e9")
        if token_id not in self._special and token_id in self._pieces:
            if self._is_byte_level:
                return bytes(_BYTES[char] for char in piece if char in _BYTES)
            if found := _BYTE.fullmatch(piece):
                return bytes([int(found[1], 16)])
            piece = piece.replace("\u2581", " ")
        return piece.encode(errors="replace")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# GPT-2's byte alphabet: printable bytes map to themselves, the others to characters from U+0100 on.
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)}
