"""Builds the native library into the wheel, or in place for an editable install."""

import subprocess
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "services/tasuki/memory/libtasuki_memory.so"


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        subprocess.run(["make", "-C", "csrc"], cwd=self.root, check=True)
        build_data["pure_python"] = False
        # Any Python 3: the library is loaded by ctypes and knows nothing of Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"
        build_data["artifacts"].append(f"/{LIBRARY}")
