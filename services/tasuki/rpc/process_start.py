"""The start of a process: seconds of each part, which it counts, logs and leaves in the run folder; imports, the collector, a deadline."""

import gc
import importlib
import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, MappingProxyType

from tasuki.config.paths import LAUNCHED_VARIABLE, replay_path, start_seconds_path
from tasuki.wire.errors import DeadlineExceeded

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


def read_replay(state_dir: Path) -> str:
    """E.g. "replaying command 12 of 60"; empty unless the trainer replays its log."""
    try:
        return replay_path(state_dir).read_text()
    except OSError:
        return ""


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


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


class StartupDeadline:
    """Ends this process between two bytecodes of its main thread.

    With exit code 128 + N on signal N (SIGTERM, SIGINT), with 1 and a line on stderr after `seconds`. No exception is raised: libraries
    that try an import swallow exceptions, and torch, whose C++ imports modules, crashes on one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.before_exit = ExitStack()
        """Clean-up before such an exit, which runs neither `finally` nor atexit handlers. It may interrupt anything in the main thread, so
        it must not log or take locks."""
        for number in _HANDLED:
            signal.signal(number, self._end)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def finish(self) -> None:
        """Ends the limit. Handlers of SIGTERM and SIGINT remain."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        try:
            for each in _HANDLED:
                signal.signal(each, signal.SIG_IGN)
            if number == signal.SIGALRM:
                self._say_why()
            self.before_exit.close()
        except Exception:  # noqa: BLE001 - no exception leaves a handler that exits
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1 if number == signal.SIGALRM else 128 + number)

    def _say_why(self) -> None:
        error = DeadlineExceeded(
            f"the engine did not start within coordinator.stage_timeout_s = {self._seconds:g} s", rpc="start"
        )
        # A new line, since an engine rank may have left a progress bar. sys.stderr may be in the middle of a write.
        os.write(2, f"\ntasuki.rollout: {error.reason}: {error.message}\n".encode())
