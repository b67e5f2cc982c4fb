"""The command that installs optional packages of tasuki."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_UV = Path(".uv/bin/uv")


def install_extras(*extras: str) -> str:
    """Tells how to install extras. tasuki is on no package index, so it is installed from its checkout.

    In an environment that uv made there is no pip, and `pip` on the PATH would be another Python's.
    """
    listed = f"'.[{','.join(extras)}]' in tasuki's checkout"
    # Not importlib.util.find_spec: setuptools takes a look for pip as a sign that pip runs, and then fails to import.
    if PathFinder.find_spec("pip") is not None:
        return f"pip install {listed}"
    if (Path(sys.prefix).parent / _UV).is_file():  # made by `make setup`
        options = " ".join(f"--extra {extra}" for name in extras for extra in name.split(","))
        return f"{_UV} sync --locked --inexact {options} in tasuki's checkout"
    return f"uv pip install --python {sys.prefix} {listed}"
