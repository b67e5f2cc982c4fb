"""Images of prompts: their files' checks, and the patches, grids and placeholders that engine and trainer compute with alike.

The processor of the model's folder makes the patches: transformers' own, in one backend, so that no two processes resize differently.
"""

import hashlib
import math
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasuki.models.config_json import read_json_object, size
from tasuki.models.known import read_model_shape
from tasuki.models.tower import Tower
from tasuki.wire.errors import InvalidArgument, NotInstalled
from tasuki.wire.extras import install_extras

if TYPE_CHECKING:
    from PIL.Image import Image

_KEY = "model.path"
_FILE, _WHOLE_FILE = "preprocessor_config.json", "processor_config.json"
_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
_EDGES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
"""The processor's defaults, which are areas in spite of their names."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
MAX_FILE_PIXELS = 1 << 26
"""Of a file as it is stored, and of all that are decoded at a time."""
_MAX_RATIO = 200
_LEVELS = {"do_rescale": False, "do_normalize": False}
MAX_PATCH_BYTES = 3 << 29
"""Patches of a call's images, which ranks get as one message; and of recent ones that are kept: of a prompt's turns, and a step's calls."""
_MAX_KNOWN = 65_536
"""Images whose number of tokens is remembered."""
_BROKEN = (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, AssertionError, EOFError, struct.error)
"""What Pillow raises for broken files, and the processor for settings."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prompt with its images as the model reads them."""

    token_ids: list[int]
    """With as many placeholders for each image as it has merged patches."""
    lengths: list[int]
    """How many tokens each one given has become: 1, or those of its image."""
    starts: list[int]
    """Place of each image's first token."""
    levels_PD: NDArray[np.uint8]
    """Patches of all images, in order: of each channel its rows and columns, as 8 bits."""
    values_CL: NDArray[np.float32]
    """What the model reads for each channel's 256 levels."""
    grids_I3: NDArray[np.int64]
    """Patches of each image in time, height and width."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of what the model reads of the images: equal for equal ones, whatever the text."""
        parts = (self.grids_I3, self.values_CL, self.levels_PD)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()

    def pixels(self, num_frames: int) -> NDArray[np.float32]:
        """[P, D * num_frames]: patches as transformers' processor makes them, with equal frames."""
        num_channels = len(self.values_CL)
        levels_PCS = self.levels_PD.reshape(len(self.levels_PD), num_channels, -1)
        pixels_PCS = self.values_CL[np.arange(num_channels)[:, None], levels_PCS]
        return np.repeat(pixels_PCS[:, :, None], num_frames, axis=2).reshape(len(levels_PCS), -1)


def read_image_processor(folder: Path) -> "ImageProcessor | None":
    """The processor of a model folder; None if the model reads text alone. Raises as read_model_file and ImageProcessor."""
    shape = read_model_shape(folder)
    return None if shape.tower is None else ImageProcessor(folder, shape.tower, vocab_size=shape.vocab_size)


class ImageProcessor:
    """Turns the files of a prompt's images into patches. Safe in several threads."""

    def __init__(self, folder: Path, tower: Tower, *, vocab_size: float = math.inf) -> None:
        """Raises InvalidArgument naming a missing key of config.json. The processor's own file is read with the first image."""
        config = read_json_object(folder / "config.json", field=_KEY)
        self._folder, self._tower = folder, tower
        self._start_id, self._end_id = (size(config, f"vision_{edge}_token_id") for edge in ("start", "end"))
        # An answer that draws one ends with it: in the middle of a prompt it could be taken for that of a picture.
        # A small model's config may name one beyond its vocabulary, with which the engine and its grammars would fail.
        known = tower.image_token_id, config.get("video_token_id")
        self.placeholder_ids = [token for token in known if isinstance(token, int) and token < vocab_size]
        self._num_tokens = dict[bytes, int]()
        self._kept = OrderedDict[bytes, tuple[NDArray[np.uint8], NDArray[np.int64]]]()
        self._lock, self._has_room, self._num_pixels = Lock(), Condition(), 0

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The folder's settings. Raises InvalidArgument naming a file and key, such as for another processor than Qwen's."""
        settings, place = _read_settings(self._folder)
        _, frames, side, _ = self._tower.patch_shape
        wanted = {"patch_size": side, "merge_size": self._tower.merge_size, "temporal_patch_size": frames, "do_resize": True}
        for key, value in wanted.items():
            if (found := settings.get(key, value)) != value:
                raise InvalidArgument(_KEY, f"{place}: {key} is {found!r}, but the model's config.json needs {value!r}")
        # Older keys of the edges win. The processor's constructor would write them into a dict of the class.
        given = settings.get("size") or {}
        if not isinstance(given, dict) or given.keys() - _EDGES:
            raise InvalidArgument(_KEY, f"{place}: size is {given!r}; give {' and '.join(_EDGES)}, which are areas")
        edges = {**_EDGES, **given}
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            old = settings.pop(key, None)
            edges[edge] = edges[edge] if old is None else old
        low, high = edges["shortest_edge"], edges["longest_edge"]
        if not (isinstance(low, int) and isinstance(high, int) and 0 < low <= high):
            raise InvalidArgument(_KEY, f"{place}: its images have at least {low!r} and at most {high!r} pixels; correct them")
        # Of calls: where they compute, and what they are given.
        own = {key: value for key, value in settings.items() if key not in ("device", "input_data_format")}
        return {**own, "size": {"shortest_edge": low, "longest_edge": high}}

    def num_tokens(self, image: bytes, *, field: str) -> int:
        """Placeholders of an image. Raises InvalidArgument naming `field` for a file that cannot be used."""
        key = hashlib.sha256(image).digest()
        if (known := self._num_tokens.get(key)) is None:
            with self._decoded(image, field=field) as decoded:
                width, height = decoded.size
            known = math.prod(self._resized(height, width)) // self._step**2
            if len(self._num_tokens) >= _MAX_KNOWN:
                self._num_tokens.clear()
            self._num_tokens[key] = known
        return known

    def header_tokens(self, image: bytes, *, field: str) -> int:
        """As num_tokens, by the file's header alone: also of one that is broken further on."""
        width, height = _opened(image, field=field).size
        return math.prod(self._resized(height, width)) // self._step**2

    @property
    def token_bytes(self) -> int:
        """Of the patches that one token stands for."""
        return self._step**2 * self._tower.patch_shape[0]

    @property
    def merge_size(self) -> int:
        """Rows and columns of patches that one token stands for."""
        return self._tower.merge_size

    @property
    def _step(self) -> int:
        return self._tower.patch_shape[-1] * self._tower.merge_size

    def places(self, token_ids: Sequence[int], num_images: int, *, field: str) -> list[int]:
        """Where the placeholders of images are: between the tokens that mark an image. Others are text that the policy drew.

        Raises InvalidArgument unless each image has one, and for a video's.
        """
        ids_T = np.fromiter(token_ids, np.int64, len(token_ids))
        is_marked_T = (ids_T[:-2] == self._start_id) & (ids_T[2:] == self._end_id) & np.isin(ids_T[1:-1], self.placeholder_ids)
        marked = (np.flatnonzero(is_marked_T) + 1).tolist()
        if videos := [place for place in marked if token_ids[place] != self._tower.image_token_id]:
            raise InvalidArgument(field, f"has the placeholder of a video at {videos[0]}; give images", token=videos[0])
        if len(marked) != num_images:
            problem = f"has {len(marked)} image placeholders (token {self._tower.image_token_id}) for {num_images} images"
            around = f"between the tokens {self._start_id} and {self._end_id}"
            raise InvalidArgument(field, f"{problem}; give one for each image, {around}, and write none into a text")
        return marked

    def check_rendered(self, token_ids: Sequence[int], num_images: int, *, field: str) -> None:
        """Raises InvalidArgument as `places`, and for any other placeholder, which a text has."""
        if (num_found := sum(token in self.placeholder_ids for token in token_ids)) != num_images:
            problem = f"has {num_found} placeholders of images and videos for {num_images} images"
            raise InvalidArgument(field, f"{problem}; write none into a text, and render images with the model's chat template")
        self.places(token_ids, num_images, field=field)

    def expand(
        self, token_ids: Sequence[int], images: Sequence[bytes], *, field: str = "prompt", ids: str = "token_ids"
    ) -> Prepared:
        """Repeats each image's placeholder for its patches.

        field, ids: the prompt's and its token ids', in errors. Raises InvalidArgument naming an image that cannot be used, or as `places`.
        """
        places = self.places(token_ids, len(images), field=f"{field}.{ids}")
        prepared = [self.patches(image, field=f"{field}.images[{index}]") for index, image in enumerate(images)]
        lengths = np.ones(len(token_ids), np.int64)
        lengths[places] = [len(levels_PD) // self.merge_size**2 for levels_PD, _ in prepared]
        starts, expanded = (np.cumsum(lengths) - lengths)[places].tolist(), np.repeat(token_ids, lengths).tolist()
        levels, grids = [levels_PD for levels_PD, _ in prepared], [grid_13 for _, grid_13 in prepared]
        levels_PD = np.concatenate(levels) if len(levels) > 1 else levels[0]
        return Prepared(expanded, lengths.tolist(), starts, levels_PD, self.values_CL, np.concatenate(grids))

    def patches(self, image: bytes, *, field: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Levels of patches and grid [1, 3] of one image; of a recent one, without computing them again."""
        key = hashlib.sha256(image).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        with self._decoded(image, field=field) as decoded:
            made = self._process(decoded, **_LEVELS)
        levels_PD = np.ascontiguousarray(self._by_channel(made)[:, :, 0]).reshape(len(made["pixel_values"]), -1)
        grid_13 = made["image_grid_thw"].astype(np.int64)
        with self._lock:
            self._kept[key] = levels_PD, grid_13
            while len(self._kept) > 1 and sum(one.nbytes for one, _ in self._kept.values()) > MAX_PATCH_BYTES:
                self._kept.popitem(last=False)
        return levels_PD, grid_13

    @contextmanager
    def _decoded(self, image: bytes, *, field: str) -> "Iterator[Image]":
        """Upright RGB. Waits until all that are decoded have at most MAX_FILE_PIXELS together. Raises InvalidArgument."""
        opened = _opened(image, field=field)
        num_pixels = math.prod(opened.size)
        with self._has_room:
            self._has_room.wait_for(lambda: self._num_pixels + num_pixels <= MAX_FILE_PIXELS)
            self._num_pixels += num_pixels
        try:
            yield _upright(opened, field=field)
        finally:
            with self._has_room:
                self._num_pixels -= num_pixels
                self._has_room.notify_all()

    @cached_property
    def values_CL(self) -> NDArray[np.float32]:
        """What the model reads for each channel's 256 levels, by the processor."""
        from PIL.Image import fromarray

        ramp = fromarray(np.tile(np.arange(256, dtype=np.uint8)[:, None], (self._step, self._step, 3)))
        levels, values = (self._by_channel(self._process(ramp, do_resize=False, **more)) for more in (_LEVELS, {}))
        if not np.isfinite(values).all():
            raise InvalidArgument(
                _KEY, f"{self._folder}: image_mean and image_std make pixels that are not finite; correct them"
            )
        values_CL = np.empty((levels.shape[1], 256), dtype=np.float32)
        for channel, values_L in enumerate(values_CL):
            values_L[levels[:, channel]] = values[:, channel]
        return values_CL

    def _process(self, image: "Image", **more: bool) -> Any:
        """Raises InvalidArgument for settings that the processor cannot compute with."""
        try:
            return self._processor(images=[image], return_tensors="np", **more)
        except (*_BROKEN, RuntimeError) as error:
            problem = f"{self._folder}: its image processor fails: {type(error).__name__}: {error}"
            raise InvalidArgument(_KEY, problem) from error

    def _by_channel(self, made: Any) -> NDArray[Any]:
        """[patches, channels, frames, pixels]."""
        channels, frames, *_ = self._tower.patch_shape
        return made["pixel_values"].reshape(len(made["pixel_values"]), channels, frames, -1)

    @cached_property
    def _processor(self) -> Any:
        """The torchvision backend, which transformers takes by default, with the folder's settings."""
        try:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        except ImportError as error:
            text = f"images need transformers and torchvision: {install_extras('rollout')}"
            raise NotInstalled(text, packages="transformers,torchvision", extras="rollout") from error
        return Qwen2VLImageProcessor.from_dict(self._settings)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Source: smart_resize of transformers' Qwen2VLImageProcessor."""
        step, edges = self._step, self._settings["size"]
        resized = [round(edge / step) * step for edge in (height, width)]
        if math.prod(resized) > edges["longest_edge"]:
            ratio = math.sqrt(height * width / edges["longest_edge"])
            resized = [max(step, math.floor(edge / ratio / step) * step) for edge in (height, width)]
        elif math.prod(resized) < edges["shortest_edge"]:
            ratio = math.sqrt(edges["shortest_edge"] / (height * width))
            resized = [math.ceil(edge * ratio / step) * step for edge in (height, width)]
        return resized[0], resized[1]


def _read_settings(folder: Path) -> tuple[dict[str, Any], Path]:
    """The settings of the folder's processor and their file, which transformers 5 writes into that of the whole processor."""
    place = folder / _WHOLE_FILE
    whole = read_json_object(place, field=_KEY) if place.is_file() else {}
    settings = whole.get("image_processor")
    if settings is None:
        place = folder / _FILE
        if not place.is_file():
            raise InvalidArgument(_KEY, f"{folder} has no {_FILE}, by which images are read; copy it from the model")
        settings = read_json_object(place, field=_KEY)
    kind = settings.get("image_processor_type")
    if kind not in _TYPES:
        raise InvalidArgument(_KEY, f"{place}: image_processor_type is {kind!r}; supported: {', '.join(_TYPES)}")
    return settings, place


def _opened(image: bytes, *, field: str) -> "Image":
    """An image that is not decoded yet, with its header checked."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise NotInstalled(f"images need pillow: {install_extras('rollout')}", packages="pillow", extras="rollout") from error
    try:
        opened = Image.open(BytesIO(image), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidArgument(field, "is no PNG, JPEG or WebP image; convert it to one") from error
    except (*_BROKEN, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidArgument(field, f"cannot be opened: {error}; replace it") from error
    width, height = opened.size
    problem = ""
    if not width or not height:
        problem = f"has {width} x {height} pixels; give an image"
    elif width * height > MAX_FILE_PIXELS:
        problem = f"has {width} x {height} pixels; at most {MAX_FILE_PIXELS} are decoded: scale it down"
    elif max(width, height) > _MAX_RATIO * min(width, height):
        problem = f"has {width} x {height} pixels; one edge may be {_MAX_RATIO} times the other: cut it"
    elif opened.format != "MPO" and (num_frames := getattr(opened, "n_frames", 1)) > 1:  # MPO: a camera's JPEG with previews
        problem = f"is animated, with {num_frames} frames; give one of them"
    elif opened.mode not in _MODES:
        problem = f"has colours of mode {opened.mode}; convert it to RGB of 8 bits"
    elif opened.format == "PNG" and any(str(tile.args).endswith(";16B") for tile in opened.tile):
        problem = "has 16 bits a sample; convert it to RGB of 8 bits"
    elif opened.mode == "P" and opened.palette is None:
        problem = "has no palette for its colours; replace it"
    if problem:
        raise InvalidArgument(field, problem)
    return opened


def _upright(opened: "Image", *, field: str) -> "Image":
    from PIL.ImageOps import exif_transpose

    with opened:  # closes the file, which a decoder may hold as pixels, too
        try:
            opened.load()
            opened.getexif()  # is kept: without these it is not written again, which a camera's may not allow
            for name in ("exif", "Raw profile type exif"):
                opened.info.pop(name, None)
            exif_transpose(opened, in_place=True)
            return opened if opened.mode == "RGB" else opened.convert("RGB")
        except _BROKEN as error:
            raise InvalidArgument(field, f"cannot be decoded: {str(error) or type(error).__name__}; replace it") from error


def image_positions(num_tokens: int, *, starts: Sequence[int], grids: NDArray[np.int64], merge_size: int) -> NDArray[np.int64]:
    """[3, T]: time, row and column of every token for the rotary embedding. starts: places of the images' first tokens.

    Text counts on in all three; an image's tokens have its first position in time, and their own rows and columns from there. Text
    after it continues at the largest position and one.
    """
    parts: list[NDArray[np.int64]] = []
    end = position = 0
    for start, (frames, rows, columns) in zip(starts, grids.tolist(), strict=True):
        text, height, width = start - end, rows // merge_size, columns // merge_size
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        position += text
        parts.append(np.indices((frames, height, width)).reshape(3, -1) + position)
        position += max(height, width)
        end = start + frames * height * width
    text = num_tokens - end
    parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
    return np.concatenate(parts, axis=1)
