"""The supported families, and lookup by config.json."""

from __future__ import annotations

from tasuki.models import gemma2, gemma3, glm4, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe
from tasuki.models.config_json import Config, architecture_of
from tasuki.models.family import Family, Model, check_keys
from tasuki.wire.errors import UnsupportedModel

_MODULES = (llama, qwen2, qwen3, qwen3_moe, mistral, gemma2, gemma3, phi3, glm4, olmo2, mixtral)
FAMILIES = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}


def find_family(architecture: str) -> Family:
    """Raises UnsupportedModel with the known names."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"architectures: {architecture} is not supported; there are {', '.join(FAMILIES)}", architecture=architecture
        )
    return FAMILIES[architecture]


def read_model(config: Config) -> Model:
    """The model described by a parsed config.json.

    Raises UnsupportedModel naming an unsupported architecture or key, InvalidArgument naming a missing or invalid key.
    """
    family = find_family(architecture_of(config))
    check_keys(config, family)
    return family.read(config)
