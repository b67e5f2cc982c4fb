"""Looks at a Hugging Face model folder before any process is started for it."""

from __future__ import annotations

from pathlib import Path

from tasuki.planner.model_shape import read_json_object
from tasuki.wire.errors import InvalidArgument, PathNotFound

_KEY = "model.path"


def check_model_folder(path: Path) -> None:
    """Raises PathNotFound or InvalidArgument, naming what is missing. Whether the architecture is known, the services say."""
    if not path.is_dir():
        raise PathNotFound(f"{_KEY}: {path} is not a folder; give a Hugging Face model folder", path=path)
    config = path / "config.json"
    if not config.is_file():
        raise PathNotFound(f"{_KEY}: {path} has no config.json; give a Hugging Face model folder", path=config)
    if not read_json_object(config, field=_KEY).get("architectures"):
        raise InvalidArgument(_KEY, f"{config} names no `architectures`, so nobody can tell which model it is")
    if not any(path.glob("*.safetensors")):
        raise PathNotFound(f"{_KEY}: {path} has no *.safetensors; convert the model first", path=path)
    if not (path / "tokenizer_config.json").is_file():
        raise PathNotFound(f"{_KEY}: {path} has no tokenizer_config.json; save the tokenizer into the folder", path=path)
