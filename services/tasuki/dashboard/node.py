"""Follows a running node: the states of its services every two seconds. Does not involve the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.node.node_snapshot import NodeReader, as_dict
from tasuki.wire.errors import TasukiError

_RETRY_S = 2.0
_POLL_S = 2.0
"""A stream of all changes would cost a node with short steps more."""


class NodeFollower:
    """Follows a node with a thread. Calls `tell` when something has changed."""

    def __init__(self, config_path: Callable[[], Path | None], tell: Callable[[], None]) -> None:
        """config_path: of the node to follow now; None if there is none."""
        self._config_path, self._tell = config_path, tell
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._reader: NodeReader | None = None
        self._state: dict[str, Any] = {}
        self._is_silent = False
        self._note = "no node runs here"
        self._thread = threading.Thread(target=self._poll, name="tasuki-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.__exit__()
        self._thread.join(_RETRY_S)

    def read(self) -> dict[str, Any]:
        """The current state. is_live: whether the coordinator has answered; is_silent: whether it has not, although a node runs."""
        with self._lock:
            return {"is_live": bool(self._state), "is_silent": self._is_silent, "note": self._note, **self._state}

    def _poll(self) -> None:
        while not self._stop.is_set():
            path = self._config_path()
            if path is None:
                self._lose("no node runs here")
            else:
                self._follow(path)
            self._stop.wait(_RETRY_S)

    def _follow(self, path: Path) -> None:
        """Follows the node until it is gone."""
        try:
            with NodeReader(load_config(path)) as reader:
                with self._lock:
                    self._reader = reader
                while not self._stop.is_set() and self._config_path() == path:
                    self._take(as_dict(reader.read_states()))
                    self._stop.wait(_POLL_S)
        except (TasukiError, OSError, ValueError) as error:  # ValueError: the channel was closed by `close`
            self._lose(str(error))
        finally:
            with self._lock:
                self._reader = None

    def _take(self, state: dict[str, Any]) -> None:
        if not state["node"].get("boot_id"):  # only the coordinator knows the node's place
            self._lose(f"the coordinator {state['absent'].get('coordinator', 'does not answer')}", is_silent=True)
            return
        with self._lock:
            is_new = {**self._state, "seen": 0} != {**state, "seen": 0}
            self._state, self._is_silent, self._note = {**state, "seen": time.time()}, False, ""
        if is_new:
            self._tell()

    def _lose(self, note: str, *, is_silent: bool = False) -> None:
        with self._lock:
            is_new = bool(self._state) or note != self._note
            self._state, self._is_silent, self._note = {}, is_silent, note
        if is_new:
            self._tell()
