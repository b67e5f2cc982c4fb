"""File by which rollout or the coordinator asks the trainer to release its state from the GPUs, which stays there until then."""

from __future__ import annotations

from pathlib import Path


class RoomRequest:
    """One request per changeover: made by a process that lacks memory, cancelled by the trainer when it offloads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    def make(self) -> None:
        self._path.touch()

    def cancel(self) -> None:
        self._path.unlink(missing_ok=True)
