"""Objects frozen for the garbage collector: imports before a fork, and objects made at a service's start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ENVIRONMENT

IMPORTED = """
import gc
IS_COLLECTING = gc.isenabled()
KEPT = [[] for _ in range(1000)]
"""
PROGRAM = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from tasuki.rpc.process_start import preload
before = gc.get_freeze_count()
preload("imported_before_forks")
import imported_before_forks
assert not imported_before_forks.IS_COLLECTING
assert gc.isenabled()
assert gc.get_freeze_count() >= before + 1000
"""


def test_nothing_is_collected_meanwhile_and_what_was_made_is_frozen(tmp_path: Path) -> None:
    (tmp_path / "imported_before_forks.py").write_text(IMPORTED)
    # In another process: objects frozen here would stay frozen.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
