"""The megatron-core backend. Nothing here is imported unless a configuration asks for it."""

from importlib import metadata

from tasuki.wire.errors import InvalidArgument

VERSION = "0.16.1"


def check_installed() -> None:
    """Raises InvalidArgument without this version of megatron-core, whose private names the backend uses."""
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        advice = 'pip install "tasuki[trainer,megatron]", or use trainer.backend = "fsdp"'
        raise InvalidArgument("trainer.backend", f'"megatron" needs megatron-core {VERSION}; {found} is installed: {advice}')
