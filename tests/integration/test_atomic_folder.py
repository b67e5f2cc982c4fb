"""Work of rank 0 for all ranks: its errors reach every rank, and none waits."""

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from tasuki.trainer.durable.atomic_folder import on_first_rank
from tasuki.wire.errors import PathExists, TasukiError
from tests.integration.forked import processes

LIMIT_S = 60.0
PATH = Path("/saves/step-1")


def raising(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


FAILURES = {
    "DISK_FULL": OSError(errno.ENOSPC, "No space left on device"),
    "PATH_PERMISSION_DENIED": OSError(errno.EACCES, "Permission denied"),
    "INVALID_ARGUMENT": OSError(errno.ENOTDIR, "Not a directory"),
    "PATH_EXISTS": PathExists("it is there"),
    "INTERNAL": ValueError("Invalid pattern \udcff"),
}


def run_rank(store_path: Path, rank: int, answers: Connection) -> None:
    """Records the reason of every failure, and whether the rank is in step afterwards."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(store_path), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    heard: list[str] = []
    for failure in FAILURES.values():
        try:
            on_first_rank(raising(failure), path=PATH)
        except TasukiError as error:
            heard.append(f"{error.reason} {error.message}")
    on_first_rank(lambda: None, path=PATH)
    answers.send(heard)


@pytest.mark.timeout(120)
def test_every_failure_of_the_first_rank_reaches_all(tmp_path: Path) -> None:
    answers = []
    for rank in range(2):
        ours, theirs = processes.Pipe()
        processes.Process(target=run_rank, args=(tmp_path / "store", rank, theirs), daemon=True).start()
        theirs.close()
        answers.append(ours)
    heard = [answer.recv() for answer in answers if answer.poll(LIMIT_S)]
    assert len(heard) == 2 and heard[0] == heard[1]
    assert [each.split()[0] for each in heard[0]] == list(FAILURES)
    assert heard[0][-1] == "INTERNAL /saves/step-1: ValueError: Invalid pattern \\udcff"
