"""Supervises a node's services in two processes, and leaves nothing behind: if either process is killed, the other cleans up.

The guard adopts orphans; the supervisor is its child and ends it by a parent death signal.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tasuki.config.lock import StateLock
from tasuki.config.paths import FIRST_START_VARIABLE, LAUNCHED_VARIABLE, REQUESTED_BY, exit_path, log_path, restart_request_path
from tasuki.memory.host import host_memory, num_memory_kills
from tasuki.node.exit_report import KEPT_LOGS, KILLED_FOR_MEMORY, read_log, rotate, rotate_open, write_exit_report
from tasuki.node.processes import SERVICE_VARIABLE, ResourceTracker, continue_stopped, end_descendants, kill_service
from tasuki.node.services import ServiceCommand, listens
from tasuki.node.watchdog import Watchdog, dump_stacks
from tasuki.wire.errors import DeadlineExceeded, TasukiError
from tasuki.wire.printable import printable
from tasuki.wire.process_tree import adopt_orphans, descendants, die_with_parent, reap

_log = logging.getLogger("tasuki.node")
GRACE_S = 5.0
KILL_S = 3.0
TICK_S = 0.1
_CHECK_EVERY_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
# A pause doubles with each restart within the last of these seconds.
_PAUSE_WINDOW_S = 60.0
_WINDOW_S = 600.0


class Supervisor:
    """The services of one node, as children of a process that `supervise` forks."""

    def __init__(
        self,
        state_dir: Path,
        services: Sequence[ServiceCommand],
        *,
        starter_fd: int,
        environment: Mapping[str, str],
        max_restarts: int,
        stall_s: float,
        progress_s: float,
        check_start: Callable[[str], None],
    ) -> None:
        """max_restarts: of each service, within ten minutes. stall_s, progress_s: see Watchdog.

        starter_fd: read end of a pipe. A byte detaches the node from its starter; end of file alone stops it.
        check_start: raises a TasukiError while a service could not start again, such as without its certificate; it is started once it
        can.
        """
        self._state_dir = state_dir
        self._resources = ResourceTracker(state_dir)
        self._environment = environment
        self._guard_pid = os.getpid()
        self._starter_fd: int | None = starter_fd
        os.set_blocking(starter_fd, False)
        self._services = {service.name: service for service in services}
        self._waiting = dict.fromkeys(self._services, 0.0)
        """Services to start -> earliest time."""
        self._pids: dict[int, ServiceCommand] = {}
        self._served: set[str] = set()
        self._exit_codes: dict[str, int] = {}
        self._ended_meanwhile: set[str] = set()
        """Services that ended while another was killed."""
        self._check_start = check_start
        self._hindered: dict[str, str] = {}
        """Services that could not start again -> why."""
        self._max_restarts = max_restarts
        self._restart_times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._num_restarts: Counter[str] = Counter()
        self._num_memory_kills = num_memory_kills()
        self._watchdog = Watchdog(state_dir, stall_s=stall_s, progress_s=progress_s)

    def supervise(self, lock: StateLock) -> int:
        """Runs and restarts the services until one has ended too often, someone asks for a stop, or the starter ends without detaching
        the node. This process becomes the guard. Returns 0 if asked to stop, 1 if a service or the supervisor failed.
        """
        adopt_orphans()
        # Polled once per tick, so that no signal handler interrupts anything.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid:
            assert self._starter_fd is not None
            os.close(self._starter_fd)
            return _guard(self._state_dir, pid, self._resources, lock=lock)
        die_with_parent(self._guard_pid, signal.SIGTERM)
        adopt_orphans()
        lock.sign(os.getpid())
        return self._run()

    def _run(self) -> int:
        reason, first, code = "", None, 0
        try:
            while not reason:
                self._start_what_can()
                self._resources.poll()
                reason, first = self._wait()
                code = 1 if first else 0
        except Exception as error:  # noqa: BLE001 - whatever it was, the services must not stay behind
            _log.exception("event=failed")
            if isinstance(error, TasukiError):
                sys.stderr.write(printable(f"tasuki: error {error.reason}: {error.message}") + "\n")
            reason, code = f"the supervisor failed: {type(error).__name__}: {error}", 1
        _log.info("event=stop reason=%s", reason)
        # The fleet service reports the reason to the other nodes.
        write_exit_report(self._state_dir, reason=reason, first=first)
        try:
            self._resources.scan()
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            # A stopped process would not receive it, and others wait for that one.
            continue_stopped(descendants(os.getpid()))
            end_descendants(grace_s=GRACE_S, kill_s=KILL_S, watch=self._note)
        finally:
            self._resources.remove()
            write_exit_report(
                self._state_dir, reason=reason, first=first, exit_codes=self._exit_codes, restarts=self._num_restarts
            )
        return code

    def _start_what_can(self) -> None:
        now = time.monotonic()
        for name, not_before in list(self._waiting.items()):
            service = self._services[name]
            after = None if self._starts_first(name) else service.after
            if now >= not_before and (after is None or listens(self._services[after].target)):
                if self._is_hindered(name):
                    self._waiting[name] = now + _CHECK_EVERY_S
                    continue
                del self._waiting[name]
                self._start(service)

    def _start(self, service: ServiceCommand) -> None:
        supervisor_pid = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            die_with_parent(supervisor_pid, signal.SIGTERM)

        ours = {SERVICE_VARIABLE: service.name, LAUNCHED_VARIABLE: str(time.monotonic())}
        if self._starts_first(service.name):
            ours[FIRST_START_VARIABLE] = "1"
        with _fresh_log(log_path(self._state_dir, service.name)) as log:
            process = subprocess.Popen(
                service.argv,
                env={**self._environment, **service.environment, **ours},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own group, so that signals from a terminal do not reach it. Forking is safe: this process has no threads.
                start_new_session=True,
                # Only models that the trainer exports follow the user's umask.
                umask=-1 if service.name == "trainer" else 0o077,
                preexec_fn=in_child,
            )
        # `reap` waits for it. Popen would, if it is collected or another begins after the service has ended, and the end be missed.
        process.returncode = 0
        self._pids[process.pid] = service
        self._watchdog.launched(service.name, process.pid)
        _log.info("event=started service=%s pid=%d", service.name, process.pid)

    def _is_hindered(self, name: str) -> bool:
        """Whether a service that has served would end at once, which would use up its restarts."""
        if self._starts_first(name):
            return False
        try:
            self._check_start(name)
        except TasukiError as error:
            problem = f"{error.reason}: {error.message}"
            if self._hindered.get(name) != problem:
                self._hindered[name] = problem
                _log.error("event=restart_waits service=%s error=%s", name, problem)
            return True
        self._hindered.pop(name, None)
        return False

    def _starts_first(self, name: str) -> bool:
        """Whether the service has not served since the node started."""
        return name not in self._served

    def _wait(self) -> tuple[str, str | None]:
        """Waits a moment and handles events. Returns why the node must stop, or an empty string, and the service to blame."""
        time.sleep(TICK_S)
        asked = asked_to_stop()
        if os.getppid() != self._guard_pid:  # whose end sends SIGTERM
            return "the guard was killed", None
        if asked is not None:
            return f"{REQUESTED_BY} {asked.name}", None
        if self._starter_is_gone():
            return "the process that started the node ended", None
        for service in self._pids.values():
            if service.name not in self._served and (not service.target or listens(service.target)):
                self._served.add(service.name)
        for name in self._services:
            rotate_open(log_path(self._state_dir, name), keep=KEPT_LOGS)
        ended = self._ended()
        lack = self._lack_of_memory() if ended else ""
        for name, how in ended.items():
            why = self._start_again(name, how)
            if why:
                return why + lack, name
        return "", None

    def _ended(self) -> dict[str, str]:
        """Services that ended unexpectedly, or must be killed because they hang or a restart was requested, and which of these."""
        ended = dict.fromkeys((*self._ended_meanwhile, *self._note(reap())), "ended by itself")
        self._ended_meanwhile.clear()
        if (stall := self._watchdog.check(now=time.monotonic())) is not None and stall.service not in ended:
            stacks = "-" if stall.is_gone else dump_stacks(self._state_dir, stall)
            event = "lost" if stall.is_gone else "stalled"
            _log.error("event=%s process=%s pid=%d cause=%s stacks=%s", event, stall.process, stall.pid, stall.cause, stacks)
            ended[stall.service] = f"lost {stall.process}" if stall.is_gone else f"hung ({stall.process}: {stall.cause})"
        for name in self._services:
            request = restart_request_path(self._state_dir, name)
            if request.exists() and name not in ended:
                cause = request.read_text()
                _log.error("event=restart_asked service=%s cause=%s", name, cause)
                ended[name] = f"had to be restarted ({cause})"
            request.unlink(missing_ok=True)
        return ended

    def _lack_of_memory(self) -> str:
        """Words for the exit report if the kernel has killed processes for memory since the last look; else empty."""
        before, self._num_memory_kills = self._num_memory_kills, num_memory_kills()
        if self._num_memory_kills <= before:
            return ""
        words = f"{KILLED_FOR_MEMORY}: {host_memory().describe()}, or lower what the node needs (`tasuki plan CONFIG`)"
        _log.error("event=killed_for_memory message=%s", words)
        return f"; {words}"

    def _start_again(self, name: str, how: str) -> str:
        """Kills what is left of the service and schedules its restart. Returns why it must not restart, or an empty string.

        how: why it must be started again, as a verb of the service.
        """
        code = self._exit_codes.get(name)
        if code in self._services[name].final_codes:
            return f"{name} ended with exit code {code}"
        if name not in self._served:
            return f"{name} {how} before it served"
        now, times = time.monotonic(), self._restart_times[name]
        while times and now - times[0] > _WINDOW_S:
            times.popleft()
        if len(times) >= self._max_restarts:
            return f"{name} {how}, more often than restart.max_restarts allows"
        times.append(now)
        self._num_restarts[name] += 1
        recent = sum(now - restarted <= _PAUSE_WINDOW_S for restarted in times)
        pause_s = min(_FIRST_PAUSE_S * 2 ** (recent - 1), _LONGEST_PAUSE_S)
        self._resources.scan()
        try:
            num_killed = kill_service(name, kill_s=KILL_S, watch=lambda pids: self._ended_meanwhile.update(self._note(pids)))
        except DeadlineExceeded as error:  # a new one would find the memory taken
            return f"{name} {how}, and cannot be restarted: {error.message}"
        self._ended_meanwhile.discard(name)
        self._watchdog.forget(name)
        self._pids = {pid: service for pid, service in self._pids.items() if service.name != name}
        self._waiting[name] = time.monotonic() + pause_s
        _log.warning(
            "event=restart service=%s number=%d killed=%d pause_s=%.1f", name, self._num_restarts[name], num_killed, pause_s
        )
        return ""

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

    def _note(self, ended: Mapping[int, int]) -> list[str]:
        """Records the exit codes of services and returns their names."""
        self._resources.poll()
        names: list[str] = []
        for pid, code in ended.items():
            service = self._pids.pop(pid, None)
            if service is not None:
                self._exit_codes[service.name] = code
                names.append(service.name)
                _log.info("event=ended service=%s pid=%d exit_code=%d", service.name, pid, code)
        return names


def asked_to_stop() -> signal.Signals | None:
    """The stop signal received since the last call.

    Avoids sigtimedwait: if this process is stopped and continued meanwhile, Python's returns a signal that was never sent.
    """
    pending = signal.sigpending() & set(STOP_SIGNALS)
    return signal.Signals(signal.sigwait(pending)) if pending else None


def _fresh_log(path: Path) -> BinaryIO:
    """Opens `path` after setting aside earlier logs. If it cannot be written, the service runs without a log."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rotate(path, keep=KEPT_LOGS)
        path.touch(mode=0o600)
        return path.open("ab")  # for rotate_open
    except OSError as error:
        _log.error("event=no_log path=%s error=%s", path, error)
        return Path(os.devnull).open("wb")


def _guard(state_dir: Path, supervisor_pid: int, resources: ResourceTracker, *, lock: StateLock) -> int:
    """Waits for the supervisor, then does what it could not do."""
    code = None
    while code is None:
        resources.poll()
        time.sleep(TICK_S)
        if asked_to_stop() is not None:
            with suppress(ProcessLookupError):
                os.kill(supervisor_pid, signal.SIGTERM)
        code = reap().get(supervisor_pid)
    lock.sign(os.getpid())  # of the supervisor nothing is left that `stop_node` could follow to what is below this process
    resources.scan()
    end_descendants(grace_s=GRACE_S, kill_s=KILL_S, watch=lambda _: resources.poll())
    resources.remove()
    if not exit_path(state_dir).exists():
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        _log.warning("event=supervisor_ended exit_code=%d", code)
        restarts = Counter(re.findall(r" event=restart service=(\w+)", read_log(log_path(state_dir, "supervisor"))))
        write_exit_report(state_dir, reason=f"the supervisor {how}", first=None, restarts=restarts)
    return code
