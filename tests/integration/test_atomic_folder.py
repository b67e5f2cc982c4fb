"""Work of rank 0 for all ranks: its errors reach every rank, and none waits."""

import errno
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.durable.atomic_folder import on_first_rank
from tasuki.wire.errors import PathExists, TasukiError
from tests.integration.launched import run_ranks

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


def check_failures(_: DeviceMesh) -> None:
    heard: list[str] = []
    for failure in FAILURES.values():
        try:
            on_first_rank(raising(failure), path=PATH)
        except TasukiError as error:
            heard.append(f"{error.reason} {error.message}")
    on_first_rank(lambda: None, path=PATH)  # in step afterwards
    everyone: list[list[str]] = [[], []]
    dist.all_gather_object(everyone, heard)
    assert everyone[0] == everyone[1]
    assert [each.split()[0] for each in heard] == list(FAILURES)
    assert heard[-1] == "INTERNAL /saves/step-1: ValueError: Invalid pattern \\udcff"


def test_every_failure_of_the_first_rank_reaches_all() -> None:
    run_ranks(check_failures, num_ranks=2)
