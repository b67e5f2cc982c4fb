"""`pip install tasuki` is light: client, command line and coordinator import and run without torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIGHT = [
    "algorithms", "v1", "wire", "config", "planner", "models", "rpc", "coordinator", "fleet", "node", "runs", "trackers", "doctor",
    "dashboard", "cli", "client",
]  # fmt: skip

# Imports every module of the packages given as arguments; importing a heavy one raises as if it were not installed.
IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "safetensors", "sglang", "triton", "zmq", "opentelemetry"}:
            raise ModuleNotFoundError(f"{name} is not part of a light install", name=name)

sys.meta_path.insert(0, Absent())
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        is_extra = module.name == "tasuki.wire.otel"  # of `otel`
        is_started = module.name.endswith("__main__") and package != "tasuki.cli"
        # For services with ranks, whose extras have pyzmq and torch.
        is_for_ranks = module.name in {
            "tasuki.rpc.ranks", "tasuki.algorithms.batch", "tasuki.algorithms.objective", "tasuki.algorithms.lm_head",
            "tasuki.algorithms.lm_head_tiles", "tasuki.algorithms.lm_head_triton",
            "tasuki.algorithms.levels",
        }
        if not is_started and not is_for_ranks and not is_extra:
            importlib.import_module(module.name)
"""


def test_packages_import_without_torch() -> None:
    roots = [str(ROOT / root) for root in ("protos", "services", "client")]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = {roots}\n{IMPORT_ALL}",
            *(f"tasuki.{package}" for package in LIGHT),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
