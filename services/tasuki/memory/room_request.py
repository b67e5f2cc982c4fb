"""A file of the node by which rollout or the coordinator asks the trainer's state to leave the GPUs; it stays there until then."""

from __future__ import annotations

from pathlib import Path


class RoomRequest:
    """One request per changeover: the trainer withdraws it when it offloads, others make it when they lack memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    def make(self) -> None:
        self._path.touch()

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
