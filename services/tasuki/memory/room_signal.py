"""Files by which rollout and the coordinator tell the trainer, during ROLLOUT, whether the GPUs lack room or have some to spare."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)


class RoomSignal:
    """One signal of a node: room is requested, or offered, or neither. The newest call counts.

    A call that cannot change the files, as on a full disk, is logged and lost: memory then moves in its stage, or at the next call.
    """

    def __init__(self, path: Path) -> None:
        """path: of the request; the offer lies beside it."""
        self._request, self._offer = path, path.with_name(f"{path.name}-offer")
        self._logged_error = ""

    @property
    def is_requested(self) -> bool:
        return self._request.exists()

    @property
    def is_offered(self) -> bool:
        return self._offer.exists() and not self.is_requested

    def request(self) -> None:
        """Asks the trainer to release what it still holds."""
        with self._logging_errors():
            self._offer.unlink(missing_ok=True)
            self._request.touch()

    def offer(self) -> None:
        """Lets the trainer take what is free on its devices."""
        with self._logging_errors():
            self._offer.touch()
            self._request.unlink(missing_ok=True)

    def clear(self) -> None:
        with self._logging_errors():
            self._offer.unlink(missing_ok=True)
            self._request.unlink(missing_ok=True)

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Logs each new error once: a request may be repeated 50 times a second."""
        try:
            yield
        except OSError as error:
            if str(error) != self._logged_error:
                _log.error("event=room_signal_failed error=%s", error)
            self._logged_error = str(error)
        else:
            self._logged_error = ""
