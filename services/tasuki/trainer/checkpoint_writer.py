"""torch's writer of a distributed checkpoint, with errors of the disk as they are."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tasuki.trainer.folders import on_first_rank


def write_tensors(tensors: dict[str, Tensor], folder: Path, *, path: Path) -> None:
    """Writes this rank's part into `folder`, which lies aside for `path`. Every rank calls it, and all raise or none.

    Raises DiskFull or InvalidArgument, with the folder removed, when a disk is the cause, and torch's CheckpointException otherwise.
    """
    try:
        dcp.save(tensors, storage_writer=_Writer(folder, sync_files=True))
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                on_first_rank(lambda failure=failure: _raise(failure), path=path)
        raise


class _Writer(FileSystemWriter):
    """Says what the disk said."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save closes its archive when a write has failed, and that fails as well: the disk's error is the one before.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _raise(error: OSError) -> None:
    raise error
