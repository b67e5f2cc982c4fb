"""config.json of a model folder, as transformers reads it."""

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from tasuki.models.config_json import read_json_object
from tasuki.models.family import TOWER_KEYS
from tasuki.models.known import FAMILIES, read_model
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel
from tasuki.wire.regular_file import open_regular

# All have `model`, a stack of `model.layers`, and `lm_head`.
ARCHITECTURES = tuple(FAMILIES)


def read_model_config(path: Path) -> PreTrainedConfig:
    """config.json of a model folder.

    Raises PathNotFound without the folder or file; UnsupportedModel for an architecture not in ARCHITECTURES, quantized weights, or an
    unsupported key; InvalidArgument for a file that transformers cannot read.
    """
    with named_if_denied(path, key="model.path"):
        if not (path / "config.json").is_file():
            raise PathNotFound(f"model.path: {path} is not a Hugging Face model folder: config.json is missing", path=path)
        open_regular(path / "config.json").close()  # transformers' error for a denied file is that of a missing one
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise _unreadable(path, error) from error
    architecture = next(iter(config.architectures or []), "none")
    if architecture not in ARCHITECTURES:
        text = f"the trainer does not know architecture {architecture}; it knows {', '.join(ARCHITECTURES)}"
        raise UnsupportedModel(text, architecture=architecture)
    family = FAMILIES[architecture]
    if getattr(config, "quantization_config", None) is not None and "quantization_config" not in family.keys:
        text = f"{path} holds quantized weights; the trainer needs floating-point ones"
        raise UnsupportedModel(text, architecture=architecture)
    read_model(read_json_object(path / "config.json", field="model.path"))
    vars(config).pop("quantization_config", None)  # its weights are dequantized
    if not family.text_module:
        return config
    text = config.get_text_config()
    text.update({"architectures": [architecture], "tie_word_embeddings": config.tie_word_embeddings})
    if family.has_tower:
        text.update({key: config.to_dict()[key] for key in TOWER_KEYS})
    return text


def _unreadable(path: Path, error: Exception) -> InvalidArgument | UnsupportedModel:
    """Converts transformers' ValueError, raised both for an unknown model type and for a broken file."""
    first_line = str(error).splitlines()[0]
    if "model type" in first_line:
        text = f"{path}: {first_line} The trainer knows {', '.join(ARCHITECTURES)}"
        return UnsupportedModel(text, architecture="unknown")
    return InvalidArgument("model.path", f"{path}/config.json cannot be read: {first_line}")
