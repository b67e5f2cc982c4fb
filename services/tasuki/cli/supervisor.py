"""The process above a node's services: starts them, stops all when one ends, and leaves nothing behind.

Two processes, so that neither can be killed without the other cleaning up: the guard, which adopts whatever is orphaned, and below it
the supervisor proper, whose death signal is the guard's end.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tasuki.cli.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_descendants,
    reap,
    shared_memory,
    shared_memory_of,
)
from tasuki.cli.services import ServiceCommand, listens
from tasuki.config.lock import StateLock
from tasuki.config.places import exit_path, log_path, socket_dir

_log = logging.getLogger("tasuki.supervisor")
_GRACE_S = 5.0
_KILL_S = 3.0
_TICK_S = 0.1
_LOOK_EVERY_S = 10.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(
    state_dir: Path, services: Sequence[ServiceCommand], *, lock: StateLock, starter_fd: int, environment: Mapping[str, str]
) -> int:
    """Runs the services until one ends, somebody asks for a stop, or the starter goes away without having let the node go.

    starter_fd: read end of a pipe; a byte lets the node live on without its starter, the end of the file alone stops it.
    """
    adopt_orphans()
    # Taken by sigtimedwait alone, so that no handler can run in the middle of something.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    guard_pid = os.getpid()
    leftovers = Leftovers(state_dir)
    pid = os.fork()
    if pid:
        os.close(starter_fd)
        return _guard(state_dir, pid, leftovers)
    die_with_parent(guard_pid, signal.SIGTERM)
    adopt_orphans()
    lock.sign(os.getpid())
    return Supervisor(state_dir, services, leftovers, starter_fd=starter_fd, environment=environment).run()


class Supervisor:
    """The services of one node, as children of this process."""

    def __init__(
        self,
        state_dir: Path,
        services: Sequence[ServiceCommand],
        leftovers: Leftovers,
        *,
        starter_fd: int,
        environment: Mapping[str, str],
    ) -> None:
        self._state_dir = state_dir
        self._leftovers = leftovers
        self._environment = environment
        self._starter_fd: int | None = starter_fd
        os.set_blocking(starter_fd, False)
        self._waiting = list(services)
        self._pids: dict[int, ServiceCommand] = {}
        self._exit_codes: dict[str, int] = {}

    def run(self) -> int:
        """0 when it was asked to stop, 1 when a service ended by itself."""
        reason = ""
        while not reason:
            self._start_what_can()
            self._leftovers.glance()
            reason = self._wait()
        _log.info("event=stop reason=%s", reason)
        self._leftovers.look()
        first = next(iter(self._exit_codes), None)
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end_descendants(grace_s=_GRACE_S, kill_s=_KILL_S, watch=self._watch_end)
        write_exit(self._state_dir, reason=reason, first=first, exit_codes=self._exit_codes)
        self._leftovers.remove()
        return 1 if first else 0

    def _start_what_can(self) -> None:
        targets = {service.name: service.target for service in (*self._pids.values(), *self._waiting)}
        for service in list(self._waiting):
            if service.after is None or listens(targets[service.after]):
                self._waiting.remove(service)
                self._start(service)

    def _start(self, service: ServiceCommand) -> None:
        supervisor_pid = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            die_with_parent(supervisor_pid, signal.SIGTERM)

        with _fresh_log(log_path(self._state_dir, service.name)).open("wb") as log:
            process = subprocess.Popen(
                service.argv,
                env={**self._environment, **service.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A signal to our group, such as one from a terminal, is not theirs; there are no threads here that a fork could hurt.
                start_new_session=True,
                preexec_fn=in_child,
            )
        self._pids[process.pid] = service
        _log.info("event=started service=%s pid=%d", service.name, process.pid)

    def _wait(self) -> str:
        """Waits a moment. Returns why the node must stop, or nothing."""
        asked = signal.sigtimedwait(_STOP_SIGNALS, _TICK_S)
        if asked is not None:
            return f"asked by {signal.Signals(asked.si_signo).name}"
        if self._starter_is_gone():
            return "the process that started the node ended"
        self._note(reap())
        return f"{next(iter(self._exit_codes))} ended by itself" if self._exit_codes else ""

    def _starter_is_gone(self) -> bool:
        if self._starter_fd is None:
            return False
        try:
            said = os.read(self._starter_fd, 1)
        except BlockingIOError:
            return False
        os.close(self._starter_fd)
        self._starter_fd = None
        return said == b""

    def _watch_end(self, ended: Mapping[int, int]) -> None:
        self._leftovers.glance()
        self._note(ended)

    def _note(self, ended: Mapping[int, int]) -> None:
        for pid, code in ended.items():
            service = self._pids.pop(pid, None)
            if service is not None:
                self._exit_codes[service.name] = code
                _log.info("event=ended service=%s pid=%d exit_code=%d", service.name, pid, code)


class Leftovers:
    """What a killed process cannot remove itself: the run folder with its sockets, and files of its in /dev/shm."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._others = shared_memory()
        self._seen = self._others
        self._ours: set[Path] = set()
        self._next_look = 0.0

    def glance(self) -> None:
        """Looks when there is something new in /dev/shm, and now and then; cheap otherwise."""
        present = shared_memory()
        if present - self._seen or time.monotonic() >= self._next_look:
            self.look()
            self._seen = present
            self._next_look = time.monotonic() + _LOOK_EVERY_S

    def look(self) -> None:
        """Notes which shared memory the processes below this one use: when they have ended, nobody can tell."""
        self._ours |= shared_memory_of(descendants(os.getpid())) - self._others

    def remove(self) -> None:
        """Once none of them is left."""
        for path in self._ours:
            path.unlink(missing_ok=True)
        shutil.rmtree(socket_dir(self._state_dir), ignore_errors=True)


def _guard(state_dir: Path, supervisor_pid: int, leftovers: Leftovers) -> int:
    """Waits for the supervisor; when that was killed, does what it could not do any more."""
    code = None
    while code is None:
        leftovers.glance()
        if signal.sigtimedwait(_STOP_SIGNALS, _TICK_S) is not None:
            with suppress(ProcessLookupError):
                os.kill(supervisor_pid, signal.SIGTERM)
        code = reap().get(supervisor_pid)
    if code < 0:
        _log.warning("event=supervisor_killed signal=%d", -code)
        leftovers.look()
        end_descendants(grace_s=_GRACE_S, kill_s=_KILL_S, watch=lambda _: leftovers.glance())
        write_exit(state_dir, reason=f"the supervisor was killed by {signal.Signals(-code).name}", first=None, exit_codes={})
        leftovers.remove()
    return code


def write_exit(state_dir: Path, *, reason: str, first: str | None, exit_codes: Mapping[str, int]) -> None:
    """Leaves word of how the node ended. `first`: the service that ended by itself; exit codes as in `reap`.

    Of a service that ended when it was told to, an exit code says nothing: torchrun's is then 1.
    """
    told = {
        "reason": reason,
        "first": first,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "services": {
            name: {"signal": signal.Signals(-code).name}
            if code < 0
            else {"exit_code": code}
            if name == first
            else {"stopped": True}
            for name, code in exit_codes.items()
        },
    }
    partial = exit_path(state_dir).with_suffix(".part")
    partial.write_text(json.dumps(told, indent=2) + "\n")
    partial.rename(exit_path(state_dir))


def _fresh_log(path: Path) -> Path:
    """`path`, with what an earlier run wrote moved aside."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.rename(path.with_suffix(".log.old"))
    return path
