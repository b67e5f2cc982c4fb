"""Values read from files and reloaded when the files change: certificates, tokens, roles."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tasuki.wire.errors import TasukiError

_log = logging.getLogger("tasuki.wire")
_Value = TypeVar("_Value")
_Stamp = tuple[int, ...]
_HALF_REPLACED_S = 0.2
_RETRY_S = 1.0
"""Between attempts at unusable files, which a change elsewhere may cure: a folder that is closed, descriptors that are free again."""


class Reloaded(Generic[_Value]):
    """The current value of some files. Thread-safe."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], _Value], *, broken: _Value | None = None) -> None:
        """read: raises OSError or a TasukiError for unusable files, also from this constructor.

        broken: the value while changed files are unusable; by default the last good one, since cert and key are replaced one by one.
        """
        self._paths, self._read, self._broken = paths, read, broken
        self._lock = threading.Lock()
        self._retries_at: float | None = None
        self._last_error = ""
        try:
            self._stamps, self._value = self._look(), read()
        except (OSError, TasukiError):
            time.sleep(_HALF_REPLACED_S)  # the key may be replaced before its certificate
            self._stamps, self._value = self._look(), read()

    @property
    def value(self) -> _Value:
        """The value of the files now."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps, self._last_error = stamps, ""
                self._reload()
            elif self._retries_at is not None and time.monotonic() >= self._retries_at:
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value, self._retries_at = self._read(), None
        except (OSError, TasukiError) as error:
            self._retries_at = time.monotonic() + _RETRY_S
            if str(error) != self._last_error:
                self._last_error = str(error)
                _log.warning("event=files_not_reloaded paths=%s error=%s", ",".join(map(str, self._paths)), error)
            if self._broken is not None:
                self._value = self._broken
            return
        _log.info("event=files_reloaded paths=%s", ",".join(map(str, self._paths)))

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """Changes with the file, even if a link is pointed at another one."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
