"""Child programs of the benchmarks leave nothing behind, after a timeout and when the benchmark is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasuki.supervisor.processes import has_ended
from tests.bench import sync_ranks
from tests.bench.processes import REPOSITORY

# The grandchild outlives its parent and its process group.
GRANDCHILD = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
    "time.sleep(float(sys.argv[2]))\n"
)


def _ends(pid: int) -> bool:
    end = time.monotonic() + 10
    while not has_ended(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return has_ended(pid)


@pytest.mark.parametrize(("takes_s", "status"), [("0", 0), ("60", -signal.SIGKILL)])
def test_nothing_is_left_of_a_program_that_has_ended_or_had_its_time(tmp_path: Path, takes_s: str, status: int) -> None:
    (tmp_path / "program.py").write_text(GRANDCHILD)
    run = (
        "import sys, tests.bench.processes as processes; processes._GRACE_S = 0.1\n"
        "print(processes.run_to_its_end(sys.argv[1:], timeout_s=1.5))\n"
    )
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "pid"), takes_s]
    printed = subprocess.run(
        [sys.executable, "-c", run, *program], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, timeout=30
    )
    assert int(printed.stdout) == status
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import time; from tests.bench.sync_ranks import Ranks\n"
        "ranks = Ranks('timeit', [['-n', '1', '-r', '1', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)']])\n"
        "print(*ranks.hear(), flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.send_signal(signal.SIGKILL)
    assert _ends(pid)


def test_ranks_that_do_not_answer_in_time_are_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_ranks, "ANSWER_TIMEOUT_S", 1.5)
    # The first one answers; the second only begins its answer.
    times = ["print(1, flush=True); import time; time.sleep(60)", "print(end='2', flush=True); import time; time.sleep(60)"]
    ranks = sync_ranks.Ranks("timeit", [["-n1", "-r1", statement] for statement in times])
    with pytest.raises(SystemExit, match=r"^no answer in 1.5 s from timeit -n1 -r1 print\(end"):
        ranks.hear()
    assert [rank.returncode for rank in ranks._ranks] == [-signal.SIGKILL] * 2
