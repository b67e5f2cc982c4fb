"""Images of prompts: their files' checks, and the patches, grids and placeholders that engine and trainer compute with alike.

The processor of the model's folder makes the patches: transformers' own, in one backend, so that no two processes resize differently.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasuki.models.config_json import read_json_object, size
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
_MAX_FILE_PIXELS = 1 << 26
"""Of a file as it is stored; a decoded one takes 3 bytes for each."""
_MAX_RATIO = 200
_MAX_KEPT_BYTES = 1 << 28
"""Patches of recent images: a group's samples, and a prompt's turns, come one after the other."""
_PNG_DEPTH = 24
"""Offset of the bits of a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prompt with its images as the model reads them."""

    token_ids: list[int]
    """With as many placeholders for each image as it has merged patches."""
    pixels_PD: NDArray[np.float32]
    """Patches of all images, in order."""
    grids_I3: NDArray[np.int64]
    """Patches of each image in time, height and width."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of patches and grids: equal for equal images, whatever the text."""
        return hashlib.sha256(self.grids_I3.tobytes() + self.pixels_PD.tobytes()).digest()


class ImageProcessor:
    """Turns the files of a prompt's images into patches. Safe in several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument naming a file or key, such as for another processor than Qwen's."""
        config = read_json_object(folder / "config.json", field=_KEY)
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise InvalidArgument(_KEY, f"{folder}/config.json has no vision_config: the model reads no images")
        self._folder = folder
        self.token_id, self._start_id, self._end_id = (
            size(config, f"{name}_token_id") for name in ("image", "vision_start", "vision_end")
        )
        self._settings, place = _settings(folder)
        self._patch, self._merge = size(vision, "patch_size"), size(vision, "spatial_merge_size")
        wanted = {
            "patch_size": self._patch,
            "merge_size": self._merge,
            "temporal_patch_size": size(vision, "temporal_patch_size"),
            "do_resize": True,
        }
        for key, value in wanted.items():
            if (found := self._settings.get(key, value)) != value:
                raise InvalidArgument(_KEY, f"{place}: {key} is {found!r}, but the model's config.json needs {value!r}")
        self._min_pixels, self._max_pixels = self._pixel_range(place)
        self._processor: Any = None
        self._kept = OrderedDict[bytes, tuple[NDArray[np.float32], NDArray[np.int64]]]()
        self._lock = Lock()

    def num_tokens(self, image: bytes, *, field: str) -> int:
        """Placeholders of an image. Raises InvalidArgument naming `field` for a file that cannot be used."""
        width, height = _decoded(image, field=field).size
        return math.prod(self._resized(height, width)) // (self._patch * self._merge) ** 2

    def check_placeholders(self, token_ids: Sequence[int], num_images: int, *, field: str) -> None:
        """Raises InvalidArgument unless the prompt has one placeholder for each image, between the tokens that mark an image."""
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.token_id]
        if len(places) != num_images:
            problem = f"has {len(places)} image placeholders (token {self.token_id}) for {num_images} images"
            raise InvalidArgument(field, f"{problem}; give one for each image, and write none into a text")
        for place in places:
            if place in (0, len(token_ids) - 1) or (token_ids[place - 1], token_ids[place + 1]) != (
                self._start_id,
                self._end_id,
            ):
                problem = f"has a placeholder at {place} that is not between the tokens {self._start_id} and {self._end_id}"
                raise InvalidArgument(f"{field}[{place}]", f"{problem}; render images with the model's chat template")

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes], *, field: str = "prompt") -> Prepared:
        """Repeats each placeholder for the patches of its image.

        field: the prompt's, in errors. Raises InvalidArgument naming an image that cannot be used, or as check_placeholders.
        """
        self.check_placeholders(token_ids, len(images), field=f"{field}.token_ids")
        prepared = [self.patches(image, field=f"{field}.images[{index}]") for index, image in enumerate(images)]
        counts = iter(len(pixels_PD) // self._merge**2 for pixels_PD, _ in prepared)
        expanded: list[int] = []
        for token_id in token_ids:
            expanded += [token_id] * (next(counts) if token_id == self.token_id else 1)
        if len(prepared) == 1:
            return Prepared(expanded, *prepared[0])
        return Prepared(expanded, *(np.concatenate(parts) for parts in zip(*prepared, strict=True)))

    def patches(self, image: bytes, *, field: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Patches and grid [1, 3] of one image; of a recent one, without computing them again."""
        key = hashlib.sha256(image).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        decoded = _decoded(image, field=field)
        if self._processor is None:
            self._processor = self._loaded()
        made = self._processor(images=[decoded], return_tensors="np")
        pixels_PD, grid_13 = made["pixel_values"].astype(np.float32, copy=False), made["image_grid_thw"].astype(np.int64)
        with self._lock:
            self._kept[key] = pixels_PD, grid_13
            while len(self._kept) > 1 and sum(one.nbytes for one, _ in self._kept.values()) > _MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return pixels_PD, grid_13

    def _loaded(self) -> Any:
        """The torchvision backend, which transformers takes by default, with the folder's settings."""
        try:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        except ImportError as error:
            text = f"images need transformers and torchvision: {install_extras('rollout')}"
            raise NotInstalled(text, packages="transformers,torchvision", extras="rollout") from error
        edges = {"shortest_edge": self._min_pixels, "longest_edge": self._max_pixels}
        # Its constructor writes min_pixels into a dict of the class.
        known = {key: value for key, value in self._settings.items() if key not in ("min_pixels", "max_pixels")}
        return Qwen2VLImageProcessor.from_dict({**known, "size": edges})

    def _pixel_range(self, place: Path) -> tuple[int, int]:
        """Pixels that an image has after it is resized; by the processor's older keys, or in its `size`."""
        given = {**_EDGES, **(self._settings.get("size") or {})}
        low, high = (
            given[edge] if (old := self._settings.get(key)) is None else old
            for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        if not (isinstance(low, int) and isinstance(high, int) and 0 < low <= high):
            raise InvalidArgument(_KEY, f"{place}: its images have at least {low!r} and at most {high!r} pixels; correct them")
        return low, high

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Source: smart_resize of transformers' Qwen2VLImageProcessor."""
        step = self._patch * self._merge
        resized = [round(edge / step) * step for edge in (height, width)]
        if math.prod(resized) > self._max_pixels:
            ratio = math.sqrt(height * width / self._max_pixels)
            resized = [max(step, math.floor(edge / ratio / step) * step) for edge in (height, width)]
        elif math.prod(resized) < self._min_pixels:
            ratio = math.sqrt(self._min_pixels / (height * width))
            resized = [math.ceil(edge * ratio / step) * step for edge in (height, width)]
        return resized[0], resized[1]


def _settings(folder: Path) -> tuple[dict[str, Any], Path]:
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
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidArgument(field, f"cannot be opened: {error}; replace it") from error
    width, height = opened.size
    problem = ""
    if not width or not height:
        problem = f"has {width} x {height} pixels; give an image"
    elif width * height > _MAX_FILE_PIXELS:
        problem = f"has {width} x {height} pixels; at most {_MAX_FILE_PIXELS} are decoded: scale it down"
    elif max(width, height) > _MAX_RATIO * min(width, height):
        problem = f"has {width} x {height} pixels; one edge may be {_MAX_RATIO} times the other: cut it"
    elif opened.format != "MPO" and (num_frames := getattr(opened, "n_frames", 1)) > 1:  # MPO: a camera's JPEG with previews
        problem = f"is animated, with {num_frames} frames; give one of them"
    elif opened.mode not in _MODES:
        problem = f"has colours of mode {opened.mode}; convert it to RGB of 8 bits"
    elif opened.format == "PNG" and image[_PNG_DEPTH] == 16:
        problem = "has 16 bits a sample; convert it to RGB of 8 bits"
    if problem:
        raise InvalidArgument(field, problem)
    return opened


def _decoded(image: bytes, *, field: str) -> "Image":
    """Upright RGB. Raises InvalidArgument."""
    from PIL.ImageOps import exif_transpose

    with _opened(image, field=field) as opened:
        try:
            return exif_transpose(opened).convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise InvalidArgument(field, f"cannot be decoded: {error}; replace it") from error
