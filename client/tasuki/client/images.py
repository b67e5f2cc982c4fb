"""Images of chat messages: the files that a row's parts name, by path or as bytes."""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload
from urllib.parse import unquote, urlsplit

from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import open_regular

MAX_IMAGES = 16
"""Of a prompt."""
MAX_BYTES = 3 << 20
"""Of a prompt's images together: a call carries them in one message."""
_SOURCES = ("path", "bytes", "url")


def image_problem(part: Mapping[str, object]) -> str:
    """Why a part of type "image" is invalid, or an empty string. Its file is not looked at."""
    given = [name for name in _SOURCES if part.get(name) is not None]
    if unknown := [name for name, value in part.items() if name not in ("type", *_SOURCES) and value is not None]:
        return f"has an image with `{unknown[0]}`, which nothing reads; remove it"
    if len(given) != 1 or not isinstance(part[given[0]], str):
        return 'has an image without exactly one of `path`, `bytes` (in base64) and `url` ("file:///...") as text'
    if given == ["url"] and not _is_file(str(part["url"])):
        return f"has an image at {part['url']!r:.80}; only file:/// is read: download it, and give its `path`"
    return ""


def _is_file(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no address
        return False
    return parts.scheme == "file" and parts.netloc in ("", "localhost")


def with_whole_paths(prompt: object, *, folder: Path) -> object:
    """The prompt with paths of images that begin in `folder` made absolute."""

    def placed(part: Any) -> Any:
        is_path = isinstance(part, dict) and part.get("type") == "image" and part.get("path") is not None
        return {**part, "path": str(folder.absolute() / part["path"])} if is_path else part

    if not isinstance(prompt, list):
        return prompt
    return [{**one, "content": [*map(placed, one["content"])]} if isinstance(one["content"], list) else one for one in prompt]


def image_parts(prompt: object) -> list[Mapping[str, Any]]:
    """The parts of a prompt's messages that are images, in order."""
    messages: Any = prompt if isinstance(prompt, list) else ()
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def images_of(prompt: object, *, before: Sequence[bytes] = (), field: str = "prompt") -> list[bytes]:
    """The files of a prompt's images, in order, after those `before` it; none for a text. field: the prompt's name.

    Raises InvalidArgument naming the image that cannot be read, and for more or larger ones than a prompt may have.
    """
    parts = image_parts(prompt)
    if (num_images := len(before) + len(parts)) > MAX_IMAGES:
        raise InvalidArgument(field, f"has {num_images} images; at most {MAX_IMAGES} fit a prompt")
    images = [*before, *(read_image(part, index, field=field) for index, part in enumerate(parts, start=len(before)))]
    if sum(map(len, images)) > MAX_BYTES:
        problem = f"has images of more than {MAX_BYTES} bytes; scale them down, or save them as JPEG or WebP"
        raise InvalidArgument(field, problem)
    return images


class ImageFiles(Sequence[bytes]):
    """The files of a prompt's images, read whenever they are used: those of all rows may not fit in memory."""

    def __init__(self, prompt: object, *, field: str = "prompt") -> None:
        self._prompt, self._field = prompt, field
        self._num = len(image_parts(prompt))

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return images_of(self._prompt, field=self._field)[index]

    def __iter__(self) -> Iterator[bytes]:
        yield from images_of(self._prompt, field=self._field)  # protobuf hides what `iter` itself raises


def read_image(part: Mapping[str, Any], index: int, *, field: str = "prompt") -> bytes:
    """The file that a part names. Raises InvalidArgument."""
    if (text := part.get("bytes")) is not None:
        try:
            return b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
        except ValueError as error:
            raise InvalidArgument(field, f"image {index}: `bytes` is not base64: {error}") from error
    path = Path(part.get("path") or unquote(urlsplit(part["url"]).path))
    with named_if_denied(path, key="dataset"):
        try:
            with open_regular(path) as file:
                return file.read(MAX_BYTES + 1)
        except PermissionError:
            raise
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                field, f"image {index}: {path} is no file; paths begin in the folder of the dataset"
            ) from error
