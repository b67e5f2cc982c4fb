"""Supervises a node's services in two processes, and leaves nothing behind: if either process is killed, the other cleans up.

The guard adopts orphans; the supervisor is its child and ends it by a parent death signal.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasuki.config.lock import StateLock
from tasuki.config.paths import exit_path
from tasuki.node.exit_report import write_exit_report
from tasuki.node.processes import adopt_orphans, die_with_parent, end_descendants, reap
from tasuki.node.resource_tracker import ResourceTracker
from tasuki.node.restart_policy import RestartPolicy
from tasuki.node.services import ServiceCommand
from tasuki.node.supervisor import GRACE_S, KILL_S, STOP_SIGNALS, TICK_S, Supervisor, asked_to_stop
from tasuki.node.watchdog import Watchdog

_log = logging.getLogger("tasuki.node")


def supervise(
    state_dir: Path,
    services: Sequence[ServiceCommand],
    *,
    lock: StateLock,
    starter_fd: int,
    environment: Mapping[str, str],
    max_restarts: int,
    stall_s: float,
    progress_s: float,
    check_start: Callable[[str], None] = lambda _: None,
) -> int:
    """Runs and restarts the services until one has ended too often, someone asks for a stop, or the starter ends without detaching the
    node.

    max_restarts: of each service, see RestartPolicy. stall_s, progress_s: see Watchdog.
    starter_fd: read end of a pipe. A byte detaches the node from its starter; end of file alone stops it.
    check_start: raises a TasukiError while a service could not start again, such as without its certificate; it is started once it can.
    """
    adopt_orphans()
    # Polled once per tick, so that no signal handler interrupts anything.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    guard_pid = os.getpid()
    resources = ResourceTracker(state_dir)
    pid = os.fork()
    if pid:
        os.close(starter_fd)
        return _guard(state_dir, pid, resources, lock=lock)
    die_with_parent(guard_pid, signal.SIGTERM)
    adopt_orphans()
    lock.sign(os.getpid())
    supervisor = Supervisor(
        state_dir,
        services,
        resources,
        starter_fd=starter_fd,
        environment=environment,
        restarts=RestartPolicy(max_restarts=max_restarts),
        watchdog=Watchdog(state_dir, stall_s=stall_s, progress_s=progress_s),
        check_start=check_start,
    )
    return supervisor.run()


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
        write_exit_report(state_dir, reason=f"the supervisor {how}", first=None)
    return code
