"""Starts and stops a whole node, from a process that may be interrupted at any moment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.config.engine_arguments import check_argument_values
from tasuki.config.gpus import check_gpu_is_shown
from tasuki.config.instance import begin_instance
from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, StateLock, holder, lock_path
from tasuki.config.places import (
    check_owner,
    config_path,
    exit_path,
    journal_path,
    log_path,
    node_targets,
    socket_dir,
    training_log_path,
    training_run_path,
)
from tasuki.config.room import disk_full_at
from tasuki.config.save import save_config
from tasuki.config.schema import NodeConfig
from tasuki.planner.budget import check_host_budget, check_room_for_ranks
from tasuki.rpc.port import check_ports
from tasuki.rpc.service_tracer import check_telemetry
from tasuki.rpc.start_seconds import read_start_seconds, serves_line
from tasuki.supervisor.exit_report import node_down
from tasuki.supervisor.fleet_place import check_place
from tasuki.supervisor.inherited import without_secrets
from tasuki.supervisor.installed import check_node_installed
from tasuki.supervisor.model_copy import preloaded_model, remove_model_copy
from tasuki.supervisor.model_folder import check_model_folders
from tasuki.supervisor.node_settings import check_node_runs_with
from tasuki.supervisor.pool import check_pool_room
from tasuki.supervisor.post_mortem import why_it_ended
from tasuki.supervisor.processes import descendants, has_ended, parent_and_state
from tasuki.supervisor.residency import with_residency
from tasuki.supervisor.rotation import KEPT_LOGS, rotate
from tasuki.supervisor.services import ServiceCommand, node_services
from tasuki.v1 import coordinator_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import (
    DeadlineExceeded,
    DiskFull,
    InvalidArgument,
    NodeDown,
    NodeRunning,
    PeerUnavailable,
    from_rpc_error,
)

STOP_TIMEOUT_S = 10.0
_KILL_S = 3.0
_POLL_S = 0.1
# Each may contain all samples since a checkpoint.
_KEPT_TRAINING_LOGS = 2
CALL_TIMEOUT_S = 2.0
# In addition to the engine's start_timeout_s, since on CUDA the trainer may start after the engine.
_START_MARGIN_S = 300.0
_TELL_EVERY_S = 15.0
Tell = Callable[[str], None]
WaitsFor = Callable[[], str]
"""A line naming what a node waits for besides this machine, or an empty string."""


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class StartedNode:
    """A node started by this process. It stops with the process unless detached. Must be stopped or detached, once."""

    def __init__(self, config: NodeConfig, process: subprocess.Popen[bytes], *, starter_fd: int) -> None:
        self.config = config
        self.process = process
        self._starter_fd = starter_fd
        self._is_detached = False

    def detach(self) -> None:
        """Lets the node live on without this process."""
        os.write(self._starter_fd, b"1")
        os.close(self._starter_fd)
        self._is_detached = True

    def wait(self) -> int:
        """Waits until the node has ended. Returns 0 after `tasuki down`, 1 if a service ended unexpectedly."""
        return self.process.wait()

    def stop(self) -> None:
        """Stops the node. Returns once nothing of it is left."""
        with _without_interrupts():
            if not self._is_detached:
                os.close(self._starter_fd)
            stop_node(self.config.state_dir)
            self.process.wait()


def start_node(
    config: NodeConfig, *, resumes: bool = False, tell: Tell = to_stderr, waits_for: WaitsFor = lambda: ""
) -> StartedNode:
    """Starts coordinator, trainer and rollout. Returns once all three serve and the phase is known.

    resumes: the trainer resumes where the last one in the state folder ended, instead of from the model. waits_for: polled meanwhile.

    Raises NotInstalled without torch or SGLang, NodeRunning if a node is already running, PathNotFound or InvalidArgument for the model
    folder, InvalidArgument if GPUs are missing, DiskFull without space in the state folder, ServiceFailed if a service ends before it
    serves, and as `check_place` for a node of a fleet. After any exception, including KeyboardInterrupt, nothing is left running.
    """
    check_node_installed()
    check_model_folders(config)
    check_gpu_is_shown(config)
    check_host_budget(config)
    check_room_for_ranks(config)
    check_pool_room(config)
    check_ports(config)
    check_argument_values(config.rollout.engine)
    check_telemetry(config.telemetry)
    check_state_folder(config)
    with disk_full_at(config.state_dir):
        node = _begin(config, resumes=resumes, tell=tell)
    try:
        _wait_until_serving(node.config, tell=tell, supervisor=node.process, waits_for=waits_for)
    except BaseException:
        node.stop()
        raise
    return node


def _begin(config: NodeConfig, *, resumes: bool, tell: Tell) -> StartedNode:
    """Copies the model if configured, writes the state folder's files and starts the supervisor. Raises as preloaded_model."""
    lock = StateLock.take(config.state_dir, name=NODE_LOCK)
    read_fd, starter_fd = os.pipe()
    try:
        check_owner(config.state_dir)  # again: another user may have made it meanwhile
        check_place(config)
        config = with_residency(config, resumes=resumes, tell=tell)
        with preloaded_model(config, tell=tell):
            save_config(config, config_path(config.state_dir))
            exit_path(config.state_dir).unlink(missing_ok=True)
            begin_instance(config.state_dir)
            if not resumes:
                _begin_at_the_model(config.state_dir)
            process = _spawn_supervisor(config, lock_fd=lock.fd, read_fd=read_fd)
    finally:
        lock.close()
        os.close(read_fd)
    return StartedNode(config, process, starter_fd=starter_fd)


def _begin_at_the_model(state_dir: Path) -> None:
    """Sets aside the log of the last trainer in the folder, so that the node starts from its model."""
    rotate(training_log_path(state_dir), keep=_KEPT_TRAINING_LOGS)
    training_run_path(state_dir).unlink(missing_ok=True)


def check_state_folder(config: NodeConfig) -> None:
    """Refuses a folder with other files, since a node writes node.toml to its folder and removes `run` from it.

    Raises InvalidArgument, also for a FIFO or device in the place of a file, and for a folder whose sockets another user could replace.
    Files that `tasuki train` creates there before the node starts are allowed.
    """
    state_dir = Path(os.path.realpath(config.state_dir))
    check_owner(state_dir)
    for path in (*state_dir.glob("*"), *state_dir.glob("logs/*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidArgument("state_dir", f"{path} is no regular file; remove it, or choose another folder")
    if not state_dir.is_dir() or lock_path(state_dir, name=NODE_LOCK).exists() or journal_path(state_dir).exists():
        return
    made_by_train = {lock_path(state_dir, name=TRAINING_LOCK)}
    for run in (config.train, config.sft):
        if run is not None:
            output_dir = Path(os.path.realpath(run.output_dir))
            made_by_train |= {output_dir, *output_dir.parents}
    if any(path not in made_by_train for path in state_dir.iterdir()):
        raise InvalidArgument("state_dir", f"{state_dir} contains files of something else; give the node its own folder")


def stop_node(state_dir: Path) -> bool:
    """Stops the node in `state_dir` and returns once all its processes have ended; returns False if none ran.

    Continues a supervisor or guard that was stopped with SIGSTOP. Kills a guard that does not end after its supervisor.
    Raises DeadlineExceeded naming the process that keeps the node from ending.
    """
    asked: set[int] = {os.getpid()}
    deadline = time.monotonic() + STOP_TIMEOUT_S
    guard_pid = 0
    while (pid := holder(state_dir, name=NODE_LOCK)) is not None:
        # While a node starts, the lock passes from the starting process to the supervisor.
        if pid and pid not in asked:
            asked.add(pid)
            _kill(pid, signal.SIGTERM)
            _kill(pid, signal.SIGCONT)  # a stopped process would not receive SIGTERM
        guard_pid = parent_and_state(pid)[0] or guard_pid
        is_guard_left = has_ended(pid) and _shares_lock(guard_pid, state_dir)
        if is_guard_left:
            _kill(guard_pid, signal.SIGCONT)
            if time.monotonic() > deadline and all(map(has_ended, descendants(guard_pid))):
                _kill(guard_pid, signal.SIGKILL)
        if time.monotonic() > deadline + (_KILL_S if is_guard_left else 0.0):
            raise DeadlineExceeded(f"the node has not stopped in {STOP_TIMEOUT_S:.0f} s: {_stuck(pid)}", pid=pid)
        time.sleep(_POLL_S)
    _remove_what_is_left(state_dir)
    return len(asked) > 1


def _remove_what_is_left(state_dir: Path) -> None:
    """Removes what a supervisor and a guard left that were killed at once, unless a service runs on its own in `state_dir`."""
    names = {path.stem for path in state_dir.glob("*.lock")}
    if NODE_LOCK in names and all(holder(state_dir, name=name) is None for name in names - {TRAINING_LOCK}):
        with suppress(NodeRunning), StateLock.take(state_dir, name=NODE_LOCK):
            remove_model_copy(state_dir)
            shutil.rmtree(socket_dir(state_dir), ignore_errors=True)


def _shares_lock(pid: int, state_dir: Path) -> bool:
    """Whether the process has the node's lock open, as the supervisor and its guard do."""
    lock = (state_dir / f"{NODE_LOCK}.lock").resolve()
    try:
        return any(file.resolve() == lock for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has just ended
        return False


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stuck(pid: int) -> str:
    """Why a node whose lock `pid` holds does not end, and what to do about it."""
    parent, state = parent_and_state(pid)
    # A supervisor that has ended remains until its guard, which shares the lock, ends.
    waits_for = parent if state == "Z" else pid
    if parent_and_state(waits_for)[1] == "T":
        return f"pid {waits_for} is stopped; continue it with kill -CONT {waits_for}, or end it with kill -KILL {waits_for}"
    return f"pid {waits_for} is still running; end it with kill -KILL {waits_for}, which also ends its children"


@contextmanager
def running_node(config: NodeConfig, *, may_start: bool = True, tell: Tell = to_stderr) -> Iterator[None]:
    """The node of `config`: the running one, or one started here and stopped at the end, however this process ends.

    may_start: False raises NodeDown instead of starting one. Raises InvalidArgument naming a key in which the running node differs.
    """
    check_node_runs_with(config)
    if holder(config.state_dir, name=NODE_LOCK) is not None and _stays(config, tell=tell):
        yield
        return
    if not may_start:
        raise node_down(config.state_dir)
    node = start_node(config, tell=tell)
    try:
        yield
    finally:
        try:
            node.stop()
        except DeadlineExceeded as error:  # the body of the block reports how the run ended
            tell(f"tasuki: {error.message}")


def _stays(config: NodeConfig, *, tell: Tell) -> bool:
    """Returns True once the running node serves; False if it ends instead, as after its starter was killed."""
    try:
        _wait_until_serving(config, tell=tell, supervisor=None)
    except NodeDown:
        return False
    return True


def _spawn_supervisor(config: NodeConfig, *, lock_fd: int, read_fd: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tasuki.supervisor", str(config.state_dir), str(lock_fd), str(read_fd)]
    log = log_path(config.state_dir, "supervisor")
    log.parent.mkdir(mode=0o700, exist_ok=True)
    rotate(log, keep=KEPT_LOGS)
    with log.open("wb") as output:
        return subprocess.Popen(
            argv,
            env=without_secrets(os.environ),  # noqa: TID251 - handed on
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock_fd, read_fd),
            start_new_session=True,
        )


def _wait_until_serving(
    config: NodeConfig, *, tell: Tell, supervisor: subprocess.Popen[bytes] | None, waits_for: WaitsFor = lambda: ""
) -> None:
    started = told = time.monotonic()
    deadline = started + config.rollout.start_timeout_s + _START_MARGIN_S
    waiting = {service.name: service for service in node_services(config) if service.target}
    while waiting:
        _check_runs(config, supervisor)
        for service in [service for service in waiting.values() if _is_serving(service)]:
            parts = read_start_seconds(config.state_dir, service.name)
            tell(serves_line(service.name, parts, after_s=time.monotonic() - started))
            del waiting[service.name]
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            if line := waits_for():
                tell(line)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{', '.join(waiting)} did not serve within {deadline - started:.0f} s")
        time.sleep(_POLL_S)
    state = _state_with_phase(config, supervisor=supervisor, deadline=deadline)
    where = f"coordinator at {node_targets(config)['coordinator']}"
    if config.fleet is not None:  # its nodes accept commands from the fleet only
        where = f"in fleet {config.fleet.name!r}, which clients call at {config.fleet.leader}"
    tell(f"the node is up: {types_pb2.Phase.Name(state.phase)}, {where}")


def _check_runs(config: NodeConfig, supervisor: subprocess.Popen[bytes] | None) -> None:
    """Raises why the node ended, if it has. supervisor: of a node started here, whose report is waited for."""
    if holder(config.state_dir, name=NODE_LOCK) is None:
        if supervisor is not None:
            supervisor.wait()
        raise why_it_ended(config)


def _state_with_phase(
    config: NodeConfig, *, supervisor: subprocess.Popen[bytes] | None, deadline: float
) -> coordinator_pb2.NodeState:
    """Of a node that starts, the state once the coordinator has determined its phase; a running node may be between phases.

    A coordinator that does not answer is being restarted, and is waited for.
    """
    problem = ""
    while True:
        _check_runs(config, supervisor)
        with suppress(DeadlineExceeded, PeerUnavailable):
            state = node_state(config)
            if supervisor is None or state.phase != types_pb2.PHASE_UNSPECIFIED:
                return state
            problem = state.last_error
            if problem.startswith(DiskFull.reason):
                raise DiskFull(problem.partition(": ")[2], path=config.state_dir)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the node did not reach a phase: {problem or 'no error is known'}")
        time.sleep(_POLL_S)


def node_state(config: NodeConfig) -> coordinator_pb2.NodeState:
    """The coordinator's view of the node. Raises NodeDown if none runs."""
    state_dir = config.state_dir
    if holder(state_dir, name=NODE_LOCK) is None:
        raise node_down(state_dir)
    with open_blocking_channel(node_targets(config)["coordinator"]) as channel:
        request = coordinator_pb2.GetStateRequest()
        try:
            return CoordinatorServiceStub(channel).GetState(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True).state
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks a second Ctrl-C or SIGTERM while cleaning up after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_serving(service: ServiceCommand) -> bool:
    with open_blocking_channel(service.target) as channel:
        request = health_pb2.HealthCheckRequest(service=service.health_name)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
