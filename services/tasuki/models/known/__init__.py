"""Supported families, one file for each maker, and their lookup by architecture and by config.json."""

from collections.abc import Mapping
from pathlib import Path

from tasuki.models.config_json import Config, architecture_of, read_json_object
from tasuki.models.family import Family, Model, check_keys, text_config
from tasuki.models.known import deepseek, gemma, glm, llama, openai, qwen, qwen_hybrid
from tasuki.models.shape import ModelShape, decoder_shape
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import PathNotFound, UnsupportedModel

_MAKERS = (llama, qwen, qwen_hybrid, gemma, glm, deepseek, openai)
FAMILIES: Mapping[str, Family] = {family.architecture: family for maker in _MAKERS for family in maker.FAMILIES}
_TEXT_MODULES = {family.text_module: family for family in FAMILIES.values() if family.text_module}


def find_family(architecture: str) -> Family:
    """By an architecture, or by transformers' class of its text. Raises UnsupportedModel with the known names."""
    family = FAMILIES.get(architecture, _TEXT_MODULES.get(architecture))
    if family is None:
        raise UnsupportedModel(
            f"architectures: {architecture} is not supported; there are {', '.join(FAMILIES)}", architecture=architecture
        )
    return family


def read_model(config: Config) -> Model:
    """The model described by a parsed config.json.

    Raises UnsupportedModel naming an unsupported architecture or key, InvalidArgument naming a missing or invalid key.
    """
    family = find_family(architecture_of(config))
    if family.text_module and config.get("model_type") != family.model_type:
        config = text_config(config, family)
    check_keys(config, family)
    for check in family.checks:
        check(config)
    return family.model_of(config, decoder_shape(config, **family.shape, **family.shape_of(config)))


def read_whole_model(config: Config) -> Model:
    """As read_model, of a folder's config.json. Raises UnsupportedModel, too, for the text of a vision model alone."""
    architecture = architecture_of(config)
    whole = find_family(architecture).architecture
    if architecture != whole:
        problem = f"is the text of {whole} alone, whose tensors have other names; give a folder of the whole model"
        cure = (
            "to make one, load it with transformers' AutoModelForImageTextToText, copy the text's weights into it, and save it"
        )
        raise UnsupportedModel(f"architectures: {architecture} {problem} ({cure})", architecture=architecture)
    return read_model(config)


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
    return read_whole_model(read_json_object(file, field="model"))
