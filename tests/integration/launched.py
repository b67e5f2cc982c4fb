"""Functions of tests, run by the ranks of one launch."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tasuki.trainer.launch import Launch
from tasuki.trainer.replicas import start_mesh
from tests.integration.forked import processes

TIMEOUT_S = 300.0


def run_ranks(work: Callable[..., None], *arguments: object, num_ranks: int) -> None:
    """Calls `work` with a mesh and the arguments in `num_ranks` CPU processes, until all have succeeded."""
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="tasuki-ranks-") as folder:
        ranks = [
            processes.Process(target=_run_rank, args=(work, arguments, rank, num_ranks, os.getpid(), Path(folder)), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                assert wait(running, timeout=deadline - time.monotonic()), f"{work.__name__} has not ended in {TIMEOUT_S:g} s"
                assert not any(rank.exitcode for rank in ranks), "\n".join(
                    log.read_text()[-4000:] for log in sorted(Path(folder).glob("*.log"))
                )
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _run_rank(
    work: Callable[..., None], arguments: tuple[object, ...], rank: int, num_ranks: int, parent: int, folder: Path
) -> None:
    """Runs in one rank, as the launcher starts it."""
    error_fd = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(error_fd, sys.stderr.fileno())
    launch = Launch(
        rank=rank, local_rank=rank, num_ranks=num_ranks, launcher_fd=os.pidfd_open(parent), store_path=folder / "store"
    )
    os.environ |= {**launch.environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    mesh = start_mesh("cpu", launch=launch, gpu=0, num_threads=1, timeout_s=60)
    work(mesh, *arguments)
    dist.destroy_process_group()
