"""Values that are read from files, and read again when the files change: certificates, tokens, roles."""

from __future__ import annotations

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


class Reloaded(Generic[_Value]):
    """The newest value of some files. Safe to use from several threads."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], _Value], *, broken: _Value | None = None) -> None:
        """read: raises OSError or a TasukiError for files that cannot be used; here, too.

        broken: the value while changed files cannot be used. By default the last good one: cert and key are replaced one after the other.
        """
        self._paths, self._read, self._broken = paths, read, broken
        self._lock = threading.Lock()
        try:
            self._stamps, self._value = self._look(), read()
        except (OSError, TasukiError):
            time.sleep(_HALF_REPLACED_S)  # a key may be new already, and its certificate not yet
            self._stamps, self._value = self._look(), read()

    @property
    def value(self) -> _Value:
        """The value that the files hold now."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._read()
        except (OSError, TasukiError) as error:
            _log.warning("event=files_not_reloaded paths=%s error=%s", ",".join(map(str, self._paths)), error)
            if self._broken is not None:
                self._value = self._broken
            return
        _log.info("event=files_reloaded paths=%s", ",".join(map(str, self._paths)))

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """Changes with the file, also where a link is turned to another one."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
