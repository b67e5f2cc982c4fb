"""Shapes of a language model's parameters, from a Hugging Face config.json and without torch."""

from __future__ import annotations

from pathlib import Path

from tasuki.models.config_json import read_json_object
from tasuki.models.families import read_model
from tasuki.models.family import Model
from tasuki.models.shape import ModelShape
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import PathNotFound


def read_model_shape(path: Path) -> ModelShape:
    """Reads the shape from `path`, a config.json or its folder. Raises as read_model_file."""
    return read_model_file(path).shape


def read_model_file(path: Path) -> Model:
    """Reads the model described by `path`, a config.json or its folder.

    Raises PathNotFound without the file, PathPermissionDenied, UnsupportedModel naming an unsupported architecture or key, InvalidArgument
    naming a missing or invalid key.
    """
    with named_if_denied(path, key="model"):
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            found = "is not a regular file" if file.exists() else "does not exist"
            raise PathNotFound(f"model: {file} {found}; give a config.json or its folder", path=file)
    return read_model(read_json_object(file, field="model"))
