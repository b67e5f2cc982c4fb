"""Prompts from a file, in a seeded order that can be resumed."""

import csv
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import numpy as np

from tasuki.client.images import image_problem, with_whole_paths
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, NotInstalled, PathNotFound
from tasuki.wire.extras import install_extras

Row = dict[str, object]
"""One line: `prompt`, a string or a list of chat messages, and any other fields."""
_Item = TypeVar("_Item")
# Reserved for the reward function's other arguments.
_RESERVED = ("completion", "completions", "prompts", "finish_reason", "num_tokens", "prompt_token_ids", "completion_token_ids")


def read_jsonl(path: Path | str, *, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Reads the rows of a file: JSONL, or CSV, JSON or parquet by its suffix. columns: as in `read_objects`.

    Raises PathNotFound without a file, PathPermissionDenied, and InvalidArgument naming file and line for an invalid row.
    """
    folder = Path(path).parent
    return [_checked(row, place=place, folder=folder) for place, row in read_objects(path, columns=columns)]


def read_objects(path: Path | str, *, columns: Mapping[str, str] | None = None) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file, each with its place, "file:line" or "file: row N". Raises as read_jsonl.

    The suffix decides: .csv has a header and text only, .json is an array of objects, .parquet needs the extra `hub`, and any other file
    has a JSON object per line. Empty lines are skipped. columns: the file's column of each field; other columns are left out.
    """
    path = Path(path)
    with named_if_denied(path, key="dataset"):
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            raise PathNotFound(f"dataset {path} {found}", path=path)
        file = path.open("rb")
    is_empty = True
    read = _READERS.get(path.suffix.lower(), _lines)
    with file:
        if file.peek().startswith(b"version https://git-lfs"):
            raise InvalidArgument("dataset", f"{path} is a Git LFS pointer: run `git lfs pull` in its folder")
        for place, row in read(file, path, list((columns or {}).values())):
            is_empty = False
            chosen = _chosen(row, columns, place=place) if columns else row
            yield place, refuse_filled(chosen, place=place) if read is _parquet_rows else chosen
    if is_empty:
        raise InvalidArgument("dataset", f"{path} has no {'lines' if read is _lines else 'rows'}")


def _refused(place: str, problem: str) -> InvalidArgument:
    return InvalidArgument("dataset", f"{place}: {problem}", place=place)


def _lines(file: BinaryIO, path: Path, _: Sequence[str]) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _object(line, place=place)


def _csv_rows(file: BinaryIO, path: Path, _: Sequence[str]) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the module's 128 KiB
    reader = csv.reader(TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise InvalidArgument("dataset", f"{path}:1: names a column twice: {', '.join(header)}")
        for values in reader:
            place = f"{path}:{reader.line_num}"
            if values and len(values) != len(header):
                raise _refused(place, f"has {len(values)} fields, but the header {len(header)}")
            if values:
                yield place, dict(zip(header, values, strict=True))
    except UnicodeDecodeError as error:
        file.seek(0)
        number = next(number for number, line in enumerate(file, start=1) if line.decode(errors="ignore").encode() != line)
        raise InvalidArgument("dataset", f"{path}:{number}: not UTF-8; save it as that") from error
    except csv.Error as error:
        raise InvalidArgument("dataset", f"{path}:{reader.line_num}: not CSV: {error}") from error


def _array(file: BinaryIO, path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Rows of a JSON array. Files with a line per object have this suffix, too."""
    content = file.read().removeprefix(BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        with suppress(ValueError, RecursionError):  # of several lines
            whole = json.loads(content)
            if isinstance(whole, dict) and not whole.keys() & {"prompt", "messages", *columns}:
                raise InvalidArgument("dataset", f"{path}: is an object with {', '.join(whole)}; give a list of rows")
        yield from _lines(BytesIO(content), path, columns)
        return
    try:
        rows = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("dataset", f"{path}: not JSON: {error}") from error
    yield from _json_values(rows, path)


def _parquet_rows(file: BinaryIO, path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        text = f"dataset {path} needs pyarrow: {install_extras('hub')}"
        raise NotInstalled(text, packages="pyarrow", extras="hub") from error
    try:
        opened = ParquetFile(file)
        _unique([(name, None) for name in opened.schema_arrow.names])
        batches = opened.iter_batches(columns=columns or None)
        yield from _json_values((row for batch in batches for row in batch.to_pylist()), path)
    except (ValueError, OSError) as error:  # Arrow's own
        raise InvalidArgument("dataset", f"{path}: cannot be read as parquet: {error}") from error


def refuse_filled(row: Row, *, place: str) -> Row:
    """Raises InvalidArgument for a null in `tools` or in arguments of tool calls: Arrow gives an object the keys of all rows' objects."""
    for name in ("tools", "prompt", "messages"):
        if _is_filled(row.get(name), is_inside=name == "tools"):
            problem = (
                f"`{name}` has a null in tools or arguments, perhaps a key of other rows that Arrow filled in, and templates"
            )
            raise _refused(place, f"{problem} would write it; give the rows as JSONL")
    return row


def _is_filled(value: object, *, is_inside: bool) -> bool:
    if isinstance(value, dict):
        inner = ((one, is_inside or key == "arguments") for key, one in value.items())
        return any((one is None and is_inside) or _is_filled(one, is_inside=now) for one, now in inner)
    return isinstance(value, list) and any(_is_filled(one, is_inside=is_inside) for one in value)


def _json_values(rows: Iterable[object], path: Path) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, start=1):
        place = f"{path}: row {number}"
        try:
            line = json.dumps(row).encode()
        except TypeError as error:
            raise _refused(place, f"{error}; name the columns to read in `columns`") from error
        yield place, _object(line, place=place)


_READERS = {".csv": _csv_rows, ".json": _array, ".parquet": _parquet_rows}


def _chosen(row: Row, columns: Mapping[str, str], *, place: str) -> Row:
    for column in columns.values():
        if column not in row:
            raise _refused(place, f"has no column `{column}`, which `columns` names, only {', '.join(row)}")
    return {name: row[column] for name, column in columns.items()}


def row_place(path: Path | str, index: int) -> str:
    """The "file:line" of row `index`, from 0. Reads the file again; rows from elsewhere than a file have their number."""
    places = (place for place, _ in read_objects(path)) if Path(path).is_file() else iter(())
    return next(islice(places, index, None), f"{path}: row {index + 1}")


class Dataset(Generic[_Item]):
    """Rows, or samples built from them, in a new order each epoch, endlessly."""

    def __init__(self, rows: Sequence[_Item], *, seed: int = 0) -> None:
        if not rows:
            raise InvalidArgument("dataset", "has no rows")
        self._rows, self.seed = rows, seed
        self._epoch = self._next = 0
        self._order = self._shuffled()

    def next_rows(self, num_rows: int) -> list[_Item]:
        """Returns the next rows; continues into the next epoch where one ends."""
        taken: list[_Item] = []
        while len(taken) < num_rows:
            if self._next == len(self._rows):
                self._epoch, self._next = self._epoch + 1, 0
                self._order = self._shuffled()
            count = min(num_rows - len(taken), len(self._rows) - self._next)
            taken += [self._rows[index] for index in self._order[self._next : self._next + count]]
            self._next += count
        return taken

    def position(self) -> dict[str, int]:
        """Position in the order, for `seek`."""
        return {"seed": self.seed, "epoch": self._epoch, "next": self._next, "num_rows": len(self._rows)}

    def seek(self, position: Mapping[str, int]) -> None:
        """Continues from a position. Raises InvalidArgument if the position is invalid or comes from other rows or another seed."""
        for field, own in (("seed", self.seed), ("num_rows", len(self._rows))):
            if position.get(field) != own:
                raise InvalidArgument(f"position.{field}", f"is {position.get(field)}, but this dataset has {own}")
        epoch, next_ = position.get("epoch", -1), position.get("next", -1)
        if epoch < 0 or not 0 <= next_ <= len(self._rows):
            raise InvalidArgument("position", f"there is no row {next_} of epoch {epoch}")
        self._epoch, self._next = epoch, next_
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        return [int(index) for index in np.random.default_rng([self.seed, self._epoch]).permutation(len(self._rows))]


def _unique(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has `{twice}` twice; remove one")
    return row


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is no JSON number; write null, or name the columns to read in `columns`")
    return number


def _object(line: bytes, *, place: str) -> Row:
    try:
        # From bytes, json would accept halves of surrogate pairs.
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
        if b"\\ud" in line.lower():  # half of a surrogate pair is not text: neither tokenizer nor file accepts it
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _refused(place, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _refused(place, f"expected an object, got {type(row).__name__}")
    return row


def other_columns(row: Row) -> str:
    return f"has only {', '.join(row) or 'nothing'}; `columns` can name the field's column"[:300]


def _checked(row: Row, *, place: str, folder: Path) -> Row:
    if "prompt" not in row:
        raise _refused(place, f"lacks `prompt`, {other_columns(row)}")
    for name in _RESERVED:
        if name in row:
            raise _refused(place, f"field `{name}` is reserved for the reward function; rename it")
    if problem := prompt_problem(row["prompt"]):
        raise _refused(place, f"`prompt` {problem}")
    return {**row, "prompt": with_whole_paths(row["prompt"], folder=folder)}


_CHAT_AS_TEXT = re.compile(
    r"""\s*(\[\s*\{\s*(['"])(role|content|from|value)\2\s*:"""
    r"""|(?:\[\s*)?\{(?=[^{}]*(['"])(role|from)\4\s*:)(?=[^{}]*(['"])(content|value)\6\s*:))"""
)
CHAT_AS_TEXT = "is a chat written as text, which no template would render; give a list of messages, in JSONL or parquet"


def is_chat_as_text(text: str) -> bool:
    """Whether a text is a message, or a list of them, as JSON or Python prints it."""
    return _CHAT_AS_TEXT.match(text) is not None


def prompt_problem(prompt: object) -> str:
    """Why the prompt is invalid, or an empty string."""
    if isinstance(prompt, str):
        return CHAT_AS_TEXT if is_chat_as_text(prompt) else "" if prompt else "is empty"
    if not isinstance(prompt, list):
        return f"must be a string or a list of chat messages, is {type(prompt).__name__}"
    if not prompt:
        return "has no messages"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {index} must be an object with `role` and `content`"
        if problem := _content_problem(message) or _weight_problem(message):
            return f"message {index}: {problem}"
    return ""


def _content_problem(message: Mapping[str, object]) -> str:
    """Text, a list of texts and images, or null beside `tool_calls`; anything else would reach the template as Python prints it."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return ""
    if not isinstance(content, list) or not content:
        return f"`content` must be text or a list of text parts, is {json.dumps(content)}"[:200]
    for part in content:
        if isinstance(part, dict) and part.get("type") == "image":
            if problem := image_problem(part):
                return f"`content` {problem}"
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wanted = 'neither {"type": "text", "text": ...} nor {"type": "image", "path": ...}'
            return f"`content` has a part that is {wanted}: {json.dumps(part)}"[:220]
        if unknown := [name for name, value in part.items() if name not in ("type", "text") and value is not None]:
            return f"`content` has a part with `{unknown[0]}`, which no template reads; remove it"
    return ""


def _weight_problem(message: Mapping[str, object]) -> str:
    weight = message.get("weight")
    if weight not in (None, 0, 1) or isinstance(weight, bool):
        return f"`weight` must be 0 or 1, is {json.dumps(weight)}"[:200]
    return "`weight` 1 is for the assistant's messages; remove it" if weight and message["role"] != "assistant" else ""
