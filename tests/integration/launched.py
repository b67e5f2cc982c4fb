"""Test scripts, run in the ranks of one launch."""

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tasuki.trainer.launch import Launch
from tests.integration.forked import processes

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 300.0


def run_ranks(script: str, *arguments: object, num_ranks: int) -> None:
    """Runs a script of this folder in `num_ranks` CPU processes until all have succeeded."""
    argv = [str(FOLDER / script), *map(str, arguments)]
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="tasuki-ranks-") as folder:
        ranks = [
            processes.Process(target=_run_rank, args=(argv, rank, num_ranks, os.getpid(), Path(folder)), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                assert wait(running, timeout=deadline - time.monotonic()), f"{script} has not ended in {TIMEOUT_S:g} s"
                assert not any(rank.exitcode for rank in ranks), "\n".join(
                    log.read_text()[-4000:] for log in sorted(Path(folder).glob("*.log"))
                )
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _run_rank(argv: Sequence[str], rank: int, num_ranks: int, parent: int, folder: Path) -> None:
    """Runs the script in one rank, as the launcher starts it."""
    error_fd = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(error_fd, sys.stderr.fileno())
    launch = Launch(
        rank=rank, local_rank=rank, num_ranks=num_ranks, launcher_fd=os.pidfd_open(parent), store_path=folder / "store"
    )
    os.environ |= {**launch.environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
