"""Triton kernels of the weight exchange give exact results, also without a GPU."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_kernels_copy_sum_and_merge() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_kernels"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
