"""The start of a service's process: seconds of each part, which it counts, logs and leaves in the run folder; imports and the collector."""

import gc
import importlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tasuki.config.paths import LAUNCHED_VARIABLE, start_seconds_path

_log = logging.getLogger("tasuki.rpc")
_NONE: Mapping[str, float] = MappingProxyType({})


class StartSeconds:
    """Seconds of each part, in order, since the service was launched."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """environment: the supervisor's variable tells when it launched the service; by default that is now."""
        self.parts: dict[str, float] = {}
        self._ended = float(environment.get(LAUNCHED_VARIABLE, time.monotonic()))

    def end(self, part: str, *, within: Mapping[str, float] = _NONE) -> None:
        """Counts the seconds since the last part ended. within: seconds of parts that ran meanwhile, which are counted as theirs."""
        now = time.monotonic()
        for name, seconds in {**within, part: max(0.0, now - self._ended - sum(within.values()))}.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds
        self._ended = now

    def tell(self, state_dir: Path, service: str) -> None:
        """Logs the parts of a service that now serves, and leaves them for `read_start_seconds`."""
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        _log.info("event=started_in seconds=%.1f parts=%s", sum(parts.values()), json.dumps(parts))
        path = start_seconds_path(state_dir, service)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(parts))
        partial.replace(path)


def read_start_seconds(state_dir: Path, service: str) -> dict[str, float]:
    """Seconds by part of the service's last start; empty if it has not told them."""
    try:
        return dict(json.loads(start_seconds_path(state_dir, service).read_text()))
    except OSError:
        return {}


def parts_line(parts: Mapping[str, float]) -> str:
    """E.g. "imports 12.3, model 4.0"; leaves out what takes less than 0.05 s."""
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)


def serves_line(service: str, parts: Mapping[str, float], *, after_s: float) -> str:
    """Says that a service serves, and where the seconds since the node's start went. "waiting" is the time before its last launch."""
    if not parts:
        return f"{service} serves after {after_s:.1f} s"
    waited = after_s - sum(parts.values())
    return f"{service} serves after {after_s:.1f} s: {parts_line({'waiting': waited, **parts} if waited >= 1 else parts)}"


def preload(module: str) -> None:
    """Imports `module` and freezes all objects: the collector of a fork neither visits them nor copies their pages.

    Nothing is collected meanwhile: an import makes objects that stay, and the collector would take a seventh of the time.
    """
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def freeze_started() -> None:
    """Freezes all objects at the end of a start: a later full collection would visit each of them."""
    gc.collect()
    gc.freeze()
