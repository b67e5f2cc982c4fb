"""Checks a Hugging Face model folder before any process is started for it."""

from __future__ import annotations

from pathlib import Path

from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import architecture_of, read_json_object
from tasuki.models.families import FAMILIES, read_model
from tasuki.models.folder_files import model_files
from tasuki.planner.node_plan import check_critic
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular

_KEY = "model.path"


def check_model_folders(config: NodeConfig) -> None:
    """Checks policy and critic. Raises as check_model_folder and check_critic."""
    check_model_folder(config.model.path)
    check_critic(config)


def check_model_folder(path: Path) -> None:
    """Raises PathNotFound or InvalidArgument naming what is missing, PathPermissionDenied, and the errors of read_model for config.json.

    The services check whether the architecture is supported.
    """
    with named_if_denied(path, key=_KEY):
        _check_files(path)


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise PathNotFound(f"{_KEY}: {path} is not a folder; give a Hugging Face model folder", path=path)
    config = path / "config.json"
    if not config.is_file():
        found = "'s config.json is not a regular file" if config.exists() else " has no config.json"
        raise PathNotFound(f"{_KEY}: {path}{found}; give a Hugging Face model folder", path=config)
    table = read_json_object(config, field=_KEY)
    if not table.get("architectures"):
        raise InvalidArgument(_KEY, f"{config} has no `architectures`, so the model is unknown")
    if architecture_of(table) in FAMILIES:
        read_model(table)
    weights = sorted(file for file in path.iterdir() if file.suffix == ".safetensors")
    if not weights:
        raise PathNotFound(f"{_KEY}: {path} has no *.safetensors; convert the model first", path=path)
    for file in sorted({*weights, *model_files(path)}):
        _check_readable(file)
    if not (path / "tokenizer_config.json").is_file():
        raise PathNotFound(f"{_KEY}: {path} has no tokenizer_config.json; save the tokenizer into the folder", path=path)


def _check_readable(file: Path) -> None:
    """Distinguishes an unreadable file from a missing one, for which safetensors gives the same error."""
    try:
        open_regular(file).close()
    except PermissionError:
        raise
    except OSError as error:
        text = f"{file} cannot be read ({error.strerror}): check its links"
        raise InvalidArgument(_KEY, text) from error
