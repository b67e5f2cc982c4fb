"""Start of the engine ranks: a stop while one is forked, and ranks that fail together."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.rollout.ranks import RankProcesses, RankReport
from tasuki.wire.errors import InternalError, TasukiError, UnsupportedModel
from tests.conftest import ENVIRONMENT

# `forked` runs where loguru's hook does, which SGLang installs. A rank that outlived the front would keep its output open.
FRONT = """
import os, signal, sys
from pathlib import Path
import tasuki.rollout.ranks as ranks
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rpc.process_start import StartupDeadline

def forked():
    os.kill(os.getpid(), signal.SIGTERM)
    print("forked", flush=True)

ranks.preload = lambda module: None
os.register_at_fork(after_in_parent=forked)
processes = ranks.RankProcesses()
StartupDeadline(60).before_exit.callback(processes.kill)
processes.start(NodeConfig(state_dir=Path(sys.argv[1]), model=ModelConfig(path=Path("/nowhere"))))
print("not stopped")
"""


def test_a_stop_waits_for_the_end_of_a_fork(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRONT, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "forked\n", "")


TYPED = RankReport(status="failed", reason=UnsupportedModel.reason, problem="leave it out")
UNTYPED = RankReport(status="failed", problem="ValueError: other ranks")


@pytest.mark.parametrize(
    ("reports", "kind", "problem"),
    [
        ([UNTYPED, TYPED], UnsupportedModel, "engine rank 1 could not start: leave it out"),
        ([TYPED, UNTYPED], UnsupportedModel, "engine rank 0 could not start: leave it out"),
        ([RankReport(status="ready"), UNTYPED], InternalError, "engine rank 1 could not start: ValueError: other ranks"),
    ],
)
def test_of_ranks_that_fail_together_the_one_that_knows_why_is_believed(
    reports: list[RankReport], kind: type[TasukiError], problem: str
) -> None:
    processes = RankProcesses()
    for report in reports:
        ours, theirs = multiprocessing.Pipe()
        theirs.send(report)
        processes._pipes.append(ours)
    with pytest.raises(kind, match=problem):
        processes.wait_for_reports()
