"""The families that there are, and the one that a config.json belongs to."""

from __future__ import annotations

from tasuki.models import gemma2, gemma3, glm4, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe
from tasuki.models.config_json import Config, architecture_of
from tasuki.models.family import Family, Model, check_keys
from tasuki.wire.errors import UnsupportedModel

_MODULES = (llama, qwen2, qwen3, qwen3_moe, mistral, gemma2, gemma3, phi3, glm4, olmo2, mixtral)
FAMILIES = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}


def find_family(architecture: str) -> Family:
    """Raises UnsupportedModel with the names that are known."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"architectures: {architecture} is not known; there are {', '.join(FAMILIES)}", architecture=architecture
        )
    return FAMILIES[architecture]


def read_model(config: Config) -> Model:
    """What a parsed config.json describes.

    Raises UnsupportedModel naming the architecture or the key that is not supported, InvalidArgument naming a key that is missing or wrong.
    """
    family = find_family(architecture_of(config))
    check_keys(config, family)
    return family.read(config)
