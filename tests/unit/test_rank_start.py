"""A stop that comes while a rank is forked."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import ENVIRONMENT

# As loguru's hook does, which SGLang brings in; an exception that a hook raises is lost.
FRONT = """
import os, signal, sys
from pathlib import Path
import tasuki.rollout.ranks as ranks
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rollout.startup_deadline import StartupDeadline

def let_go():
    os.kill(os.getpid(), signal.SIGTERM)
    print("let go", flush=True)

ranks.preload = lambda module: None
os.register_at_fork(after_in_parent=let_go)
StartupDeadline(60)
processes = ranks.RankProcesses()
try:
    processes.start(NodeConfig(state_dir=Path(sys.argv[1]), model=ModelConfig(path=Path("/nowhere"))))
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    processes.kill()
"""


def test_a_stop_waits_for_the_end_of_a_fork(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRONT, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "let go\n", "")
