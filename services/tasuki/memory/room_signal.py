"""Files by which rollout and the coordinator tell the trainer, during ROLLOUT, whether the GPUs lack room or have some to spare."""

from __future__ import annotations

from pathlib import Path


class RoomSignal:
    """One signal of a node: room is requested, or offered, or neither. The newest call counts."""

    def __init__(self, path: Path) -> None:
        """path: of the request; the offer lies beside it."""
        self._request, self._offer = path, path.with_name(f"{path.name}-offer")

    @property
    def is_requested(self) -> bool:
        return self._request.exists()

    @property
    def is_offered(self) -> bool:
        return self._offer.exists() and not self.is_requested

    def request(self) -> None:
        """Asks the trainer to release what it still holds."""
        self._offer.unlink(missing_ok=True)
        self._request.touch()

    def offer(self) -> None:
        """Lets the trainer take what is free on its devices."""
        self._offer.touch()
        self._request.unlink(missing_ok=True)

    def clear(self) -> None:
        self._offer.unlink(missing_ok=True)
        self._request.unlink(missing_ok=True)
