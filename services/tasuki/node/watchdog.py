"""Finds processes of a node that hang, by their heartbeat rather than a time limit, and those that are gone."""

import logging
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tasuki.config.paths import pulse_dir, stall_dir
from tasuki.node.processes import is_exiting
from tasuki.rpc.heartbeat import Pulse, read_pulse
from tasuki.wire.process_tree import parent_and_state

_log = logging.getLogger("tasuki.node")
_CHECK_EVERY_S = 0.5
# A supervisor that was itself stopped this long has missed every heartbeat.
_GAP_S = 5.0
_DUMP_TIMEOUT_S = 10.0
_NAME = re.compile(r"(?P<service>[a-z]+)\d*-(?P<pid>\d+)")
_SERVICE_OF = {"scheduler": "rollout"}


@dataclass(frozen=True, slots=True)
class Stall:
    """A process that hangs or is gone. `service`: the one to restart."""

    service: str
    process: str
    pid: int
    cause: str
    is_gone: bool = False


@dataclass(slots=True)
class _Watched:
    pulse: Pulse
    beat_time: float
    progress_time: float
    transfer_time: float


@dataclass(slots=True)
class _Launched:
    """A process that the supervisor started. running_time: when it was last seen not to be stopped."""

    service: str
    running_time: float


class Watchdog:
    """Watches the heartbeats of one node.

    stall_s: maximum age of a heartbeat, and maximum time without progress of what moves in the background. progress_s: the same of a
    command.
    """

    def __init__(self, state_dir: Path, *, stall_s: float, progress_s: float) -> None:
        self._state_dir, self._stall_s, self._progress_s = state_dir, stall_s, progress_s
        self._seen: dict[Path, _Watched] = {}
        self._launched: dict[int, _Launched] = {}
        self._checked = 0.0
        for path in self._paths():  # left by a killed node
            path.unlink(missing_ok=True)

    def launched(self, service: str, pid: int) -> None:
        """Watches a process for being stopped, which it may be before it has a heartbeat. The trainer's launcher never has one."""
        self._launched[pid] = _Launched(service, math.inf)

    def check(self, *, now: float) -> Stall | None:
        """Returns the first process found hanging or gone; looks at most twice a second."""
        if now - self._checked < _CHECK_EVERY_S:
            return None
        if now - self._checked > _GAP_S:
            self._seen.clear()
            for launched in self._launched.values():
                launched.running_time = math.inf
        self._checked = now
        return next(self._stalls(now), None)

    def forget(self, service: str) -> None:
        """Forgets a service whose processes are gone."""
        self._launched = {pid: launched for pid, launched in self._launched.items() if launched.service != service}
        for path in self._paths():
            if _service_of(path) == service:
                path.unlink(missing_ok=True)
                self._seen.pop(path, None)

    def _stalls(self, now: float) -> Iterator[Stall]:
        for pid, launched in self._launched.items():
            if launched.running_time > now or parent_and_state(pid)[1] != "T":
                launched.running_time = now
            elif now - launched.running_time > self._stall_s:
                stopped_s = now - launched.running_time
                yield Stall(launched.service, launched.service, pid, f"stopped for {stopped_s:.1f} s")
        for path in self._paths():
            pulse = read_pulse(path)
            if pulse is None:
                continue
            seen = self._seen.setdefault(path, _Watched(pulse, now, now, now))
            if pulse.beats != seen.pulse.beats:
                seen.beat_time = now
            if pulse.progress != seen.pulse.progress or not pulse.is_working:
                seen.progress_time = now
            if pulse.transferred != seen.pulse.transferred or not pulse.is_transferring:
                seen.transfer_time = now
            seen.pulse = pulse
            process, pid = path.name.rpartition("-")[::2]
            state = parent_and_state(int(pid))[1]
            if not pulse.beats and state != "T":
                # Starting: an import may hold the GIL for longer than the heartbeat limit.
                seen.beat_time = seen.progress_time = seen.transfer_time = now
            if state in "ZX" or is_exiting(int(pid)):
                # A process that ends in order removes its heartbeat file. If it never had a heartbeat, its service reports why it ended.
                if pulse.beats and path.exists():
                    yield Stall(_service_of(path), process, int(pid), "the process is gone", is_gone=True)
            elif now - seen.beat_time > self._stall_s:
                yield Stall(_service_of(path), process, int(pid), f"no heartbeat for {now - seen.beat_time:.1f} s")
            elif now - seen.transfer_time > self._stall_s:
                cause = f"no progress of a transfer in the background for {now - seen.transfer_time:.1f} s"
                yield Stall(_service_of(path), process, int(pid), cause)
            elif now - seen.progress_time > self._progress_s:
                yield Stall(_service_of(path), process, int(pid), f"no progress for {now - seen.progress_time:.1f} s")

    def _paths(self) -> list[Path]:
        return sorted(path for path in pulse_dir(self._state_dir).iterdir() if _NAME.fullmatch(path.name))


def _service_of(path: Path) -> str:
    parts = _NAME.fullmatch(path.name)
    assert parts is not None
    return _SERVICE_OF.get(parts["service"], parts["service"])


def dump_stacks(state_dir: Path, stall: Stall) -> Path:
    """Writes the stacks of all threads of the process, by py-spy; if that fails, writes why."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    path = stall_dir(state_dir) / f"{stamp}-{stall.process}-{stall.pid}.txt"
    py_spy = Path(sys.executable).with_name("py-spy")
    started = time.monotonic()
    try:
        # Nonblocking: reads a stopped process without waiting for it to stop.
        argv = [py_spy, "dump", "--nonblocking", "--pid", str(stall.pid)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DUMP_TIMEOUT_S, check=False)
        text = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"no stacks: {error}\n"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(f"{stall.process}, pid {stall.pid}: {stall.cause}\n\n{text}")
    except OSError as error:  # the hung process must be killed regardless
        _log.error("event=no_stacks path=%s error=%s", path, error)
    _log.warning("event=stacks_dumped path=%s seconds=%.2f", path, time.monotonic() - started)
    return path
