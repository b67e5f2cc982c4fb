"""GPU kernels under Triton's interpreter, in a process that enables it before anything imports Triton."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, ROOT

FOLDER = Path(__file__).parent / "interpreted"
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", *map(str, sorted(FOLDER.glob("*.py")))]


@pytest.mark.parametrize("module", [PYTEST, ["tests.interpreted_kernels"]], ids=lambda module: module[0])
def test_kernels_compute_what_plain_torch_computes(module: list[str]) -> None:
    command, environment = [sys.executable, "-m", *module], ENVIRONMENT | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and (module is not PYTEST or " passed" in ran.stdout), ran.stdout[-3000:] + ran.stderr[-2000:]
