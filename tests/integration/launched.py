"""Scripts of the tests in the ranks of one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(script: str, *arguments: object, num_ranks: int) -> None:
    """Runs a script of this folder in `num_ranks` processes on a CPU until all have ended well."""
    launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", str(num_ranks), "--"]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("protos", "services", "client", "."))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(ROOT / "tests" / "integration" / script), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
