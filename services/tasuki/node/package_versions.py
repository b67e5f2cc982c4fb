"""Packages that a node on this machine needs beyond tasuki's own."""

from __future__ import annotations

from importlib.util import find_spec

from tasuki.wire.errors import NotInstalled
from tasuki.wire.extras import install_extras

_EXTRAS = {"torch": "trainer", "transformers": "trainer", "safetensors": "trainer", "sglang": "rollout"}
"""Extra that installs each package."""


def check_node_installed() -> None:
    """Raises NotInstalled naming the extras to install, without importing a package."""
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if missing:
        extras = dict.fromkeys(_EXTRAS[name] for name in missing)
        text = f"a node needs {', '.join(missing)}: {install_extras(*extras)}"
        raise NotInstalled(text, packages=",".join(missing), extras=",".join(extras))
