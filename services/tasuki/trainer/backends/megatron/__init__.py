"""The megatron-core backend. Nothing here is imported unless a configuration asks for it."""

import warnings
from importlib import metadata

from tasuki.wire.errors import InvalidArgument
from tasuki.wire.extras import install_extras

VERSION = "0.16.1"

# That Apex and TransformerEngine, which are not used, are not installed.
warnings.filterwarnings("ignore", message=".*Apex", module=r"megatron\.")


def check_installed() -> None:
    """Raises InvalidArgument without this version of megatron-core, whose private names the backend uses."""
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        advice = f'{install_extras("trainer", "megatron")}, or use trainer.backend = "fsdp"'
        raise InvalidArgument("trainer.backend", f'"megatron" needs megatron-core {VERSION}; {found} is installed: {advice}')
