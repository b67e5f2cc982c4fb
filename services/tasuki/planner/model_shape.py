"""The shapes of a language model's parameters, from a Hugging Face config.json and without torch."""

from __future__ import annotations

from pathlib import Path

from tasuki.models.config_json import Config, read_json_object
from tasuki.models.families import read_model
from tasuki.models.family import Model
from tasuki.models.shape import ModelShape
from tasuki.wire.errors import PathNotFound


def read_model_shape(path: Path) -> ModelShape:
    """The shape in `path`, a config.json or a folder that holds one; raises as read_model_file."""
    return read_model_file(path).shape


def read_model_file(path: Path) -> Model:
    """The model that `path` describes, a config.json or a folder that holds one.

    Raises PathNotFound without the file, UnsupportedModel naming the architecture or key that is not supported, InvalidArgument naming a
    key that is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PathNotFound(f"model: {file} does not exist; give a config.json or a folder that holds one", path=file)
    return read_model(read_json_object(file, field="model"))


def shape_of(config: Config) -> ModelShape:
    """The shape that a config.json's table describes; raises as read_model_file."""
    return read_model(config).shape
