"""Our parts of an engine on SGLang's own classes, without an engine. One process runs them: importing SGLang takes most of the time."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ENVIRONMENT, ROOT

FOLDER = Path(__file__).parent / "engine_parts"


def test_every_part_works_on_sglangs_own_classes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, sorted(FOLDER.glob("*.py")))]
    environment = ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-2000:]
