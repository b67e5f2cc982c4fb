"""A run's sample dump: its steps, the completions of one step, and one completion by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasuki.trainer.durable.regular_file import open_regular
from tasuki.wire.errors import InvalidArgument, PathNotFound

_NAME = re.compile(r"step-(\d{6,15})\.jsonl")
_MAX_BYTES = 64_000_000
_SHOWN_CHARS = 600
_MAX_CHARS = 200_000
_MAX_TOKENS = 20_000
_NUMBERS = ("reward", "advantage", "log_prob_gap", "log_prob_gap_max", "temperature")


def list_steps(folder: Path | None) -> list[int]:
    """Steps with samples, in order; empty without the folder."""
    try:
        names = [] if folder is None else [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def read_step(folder: Path | None, step: int) -> dict[str, Any]:
    """The step's completions with shortened texts. Raises PathNotFound for a step without samples."""
    lines, is_cut = _lines(folder, step)
    samples = [_head(index, sample) for index, sample in enumerate(map(_sample, lines)) if sample is not None]
    return {"step": step, "samples": samples, "is_cut": is_cut, "num_bad_lines": len(lines) - len(samples)}


def read_sample(folder: Path | None, step: int, index: int, *, token_text: Callable[[int], str | None]) -> dict[str, Any]:
    """One completion, up to 20,000 tokens. Raises PathNotFound, and InvalidArgument for an invalid line."""
    lines, _ = _lines(folder, step)
    if not 0 <= index < len(lines):
        raise PathNotFound(f"step {step} has {len(lines)} samples, counted from 0: there is no {index}", step=step)
    sample = _sample(lines[index])
    if sample is None:
        raise InvalidArgument("sample", f"line {index + 1} of step {step} is not a sample")
    token_ids = [one for one in _list(sample, "token_ids") if isinstance(one, int)][:_MAX_TOKENS]
    return {
        **_head(index, sample, max_chars=_MAX_CHARS),
        "fields": {str(name): _text(value, _MAX_CHARS) for name, value in _table(sample, "fields").items()},
        "num_tokens": len(_list(sample, "token_ids")),
        "token_ids": token_ids,
        "tokens": [token_text(one) for one in token_ids],
        **{name: _numbers(sample, name, len(token_ids)) for name in ("rollout_log_probs", "trainer_log_probs", "advantages")},
    }


def _lines(folder: Path | None, step: int) -> tuple[list[bytes], bool]:
    """Lines of the step, without a last line that is still being written."""
    if folder is None:
        raise PathNotFound("the node has no run yet")
    path = folder / f"step-{step:06d}.jsonl"
    try:
        with open_regular(path) as file:
            lines = file.readlines(_MAX_BYTES)
            is_cut = bool(file.read(1))
    except OSError as error:
        raise PathNotFound(f"step {step} has no samples: {error.strerror}", path=path) from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return lines, is_cut


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
        "rewards": {str(name): _number(value) for name, value in _table(sample, "rewards").items()},
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
    return value if isinstance(value, dict) else {}
