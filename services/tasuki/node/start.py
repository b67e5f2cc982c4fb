"""Starts a whole node and waits until it serves, from a process that may be interrupted at any moment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import grpc

from tasuki.config.checks import fleet_port_problem
from tasuki.config.choices import write_choices
from tasuki.config.gpus import check_gpu_is_shown
from tasuki.config.load import save_config, write_private
from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, StateLock, begin_instance, disk_full_at, holder, lock_path
from tasuki.config.paths import (
    check_owner,
    client_target,
    config_path,
    exit_path,
    journal_path,
    log_path,
    model_texts_path,
    node_targets,
    readable_by_others,
    training_log_path,
    training_run_path,
)
from tasuki.config.schema import NodeConfig
from tasuki.config.table import UNIX
from tasuki.models.folder_files import text_digests
from tasuki.node.choose import check_host_budget, check_host_ranks, choose
from tasuki.node.exit_report import KEPT_LOGS, log_ends, node_down, rotate, why_it_ended
from tasuki.node.model_folder import check_model_folders
from tasuki.node.node_settings import check_node_runs_with, running_settings
from tasuki.node.processes import preloaded_model, stop_node, to_stderr
from tasuki.node.services import listens, node_services, without_secrets
from tasuki.rpc.access import ClientPaths
from tasuki.rpc.failpoints import check_failpoints
from tasuki.rpc.logs import check_telemetry
from tasuki.rpc.methods import PathUse
from tasuki.rpc.port import check_ports, fleet_port
from tasuki.rpc.process_start import read_replay, read_start_seconds, serves_line
from tasuki.trainer.backends import megatron
from tasuki.v1 import coordinator_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.address import bind_once, interfaces_with_address, split_host_port
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NodeDown,
    NodeRunning,
    NotInstalled,
    PeerUnavailable,
    PermissionDenied,
    from_rpc_error,
)
from tasuki.wire.extras import install_extras

# Each may contain all samples since a checkpoint.
_KEPT_TRAINING_LOGS = 2
_POLL_S = 0.1
CALL_TIMEOUT_S = 2.0
# In addition to the engine's start, since the trainer may load its model only once the engine sleeps.
_START_MARGIN_S = 300.0
_TELL_EVERY_S = 10.0
_LONG_S = 60.0
"""From here on the end of a log tells what a start does, as SGLang's compiling of kernels."""
Tell = Callable[[str], None]
WaitsFor = Callable[[], str]
"""A line naming what a node waits for besides this machine, or an empty string."""
_EXTRAS = {"torch": "trainer", "transformers": "trainer", "safetensors": "trainer", "sglang": "rollout"}
"""Extra that installs each package."""


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

    def stop(self, *, tell: Tell = to_stderr) -> None:
        """Stops the node. Returns once nothing of it is left. Raises as stop_node."""
        with _without_interrupts():
            if not self._is_detached:
                os.close(self._starter_fd)
            stop_node(self.config.state_dir, tell=tell)
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
    if config.trainer.backend == "megatron":
        megatron.check_installed()
    check_host_ranks(config)
    check_model_folders(config)
    check_gpu_is_shown(config)
    check_host_budget(config)
    check_ports(config)
    check_telemetry()
    check_failpoints(config)
    check_state_folder(config)
    with disk_full_at(config.state_dir):
        node = _begin(config, resumes=resumes, tell=tell)
    try:
        wait_until_serving(node.config, tell=tell, supervisor=node.process, waits_for=waits_for)
    except BaseException:
        node.stop(tell=tell)
        raise
    return node


def _begin(config: NodeConfig, *, resumes: bool, tell: Tell) -> StartedNode:
    lock = StateLock.take(config.state_dir, name=NODE_LOCK)
    read_fd, starter_fd = os.pipe()
    try:
        check_owner(config.state_dir)  # again: another user may have made it meanwhile
        check_place(config)
        choices = choose(config, resumes=resumes, tell=tell)
        with preloaded_model(config, tell=tell):
            save_config(config, config_path(config.state_dir))
            write_private(model_texts_path(config.state_dir), json.dumps(text_digests(config.model.path)))
            write_choices(choices, config.state_dir)
            exit_path(config.state_dir).unlink(missing_ok=True)
            begin_instance(config.state_dir)
            make_private(config.state_dir, tell=tell)
            if not resumes:
                _begin_at_the_model(config.state_dir)
            process = _spawn_supervisor(config, lock_fd=lock.fd, read_fd=read_fd)
    except BaseException:
        os.close(starter_fd)  # which ends a supervisor that has started
        raise
    finally:
        lock.close()
        os.close(read_fd)
    return StartedNode(config, process, starter_fd=starter_fd)


def make_private(state_dir: Path, *, tell: Tell) -> None:
    """Takes the permissions of other users from the node's files of earlier starts, and tells of a folder that they may read."""
    for path in filter(Path.is_file, (*state_dir.glob("*"), *state_dir.glob("logs/*"))):
        with suppress(PermissionError):  # another user's
            path.chmod(path.stat().st_mode & 0o700)
    if told := readable_by_others(state_dir):
        tell(f"state_dir: {told}")


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


@contextmanager
def running_node(config: NodeConfig, *, may_start: bool = True, tell: Tell = to_stderr) -> Iterator[None]:
    """The node of `config`: the running one, or one started here and stopped at the end, however this process ends.

    may_start: False raises NodeDown instead of starting one. Raises InvalidArgument naming a key in which the running node differs.
    """
    check_node_runs_with(config)
    if holder(config.state_dir, name=NODE_LOCK) is not None:
        # It may end instead of serving, as after its starter was killed.
        try:
            wait_until_serving(config, tell=tell, supervisor=None)
        except NodeDown:
            pass
        else:
            yield
            return
    if not may_start:
        raise node_down(config.state_dir)
    node = start_node(config, tell=tell)
    try:
        yield
    finally:
        try:
            node.stop(tell=tell)
        except DeadlineExceeded as error:  # the body of the block reports how the run ended
            tell(f"tasuki: {error.message}")


def _spawn_supervisor(config: NodeConfig, *, lock_fd: int, read_fd: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "tasuki.node", str(config.state_dir), str(lock_fd), str(read_fd)]
    log = log_path(config.state_dir, "supervisor")
    log.parent.mkdir(mode=0o700, exist_ok=True)
    rotate(log, keep=KEPT_LOGS)
    log.touch(mode=0o600)
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


def wait_until_serving(
    config: NodeConfig, *, tell: Tell, supervisor: subprocess.Popen[bytes] | None, waits_for: WaitsFor = lambda: ""
) -> None:
    """Waits until all services serve and the coordinator knows the phase, telling of each. supervisor: of a node started here.

    Raises the reason if the node ends, DeadlineExceeded if it takes too long, not counting what the trainer replays.
    """
    started = told = time.monotonic()
    timeout_s = config.coordinator.stage_timeout_s + _START_MARGIN_S
    deadline, replay, progress = started + timeout_s, read_replay(config.state_dir), ""
    waiting = {service.name: service for service in node_services(config) if service.target}
    has_waited = supervisor is not None
    while waiting:
        _check_runs(config, supervisor)
        for service in [service for service in waiting.values() if listens(service.target)]:
            parts = read_start_seconds(config.state_dir, service.name)
            line = serves_line(service.name, parts, after_s=time.monotonic() - started)
            tell(line if has_waited else f"{service.name} serves already")
            del waiting[service.name]
        if (now := read_replay(config.state_dir)) != replay:
            deadline, replay, progress = time.monotonic() + timeout_s, now, f", {now}" if now else ""
        if waiting and time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            said = log_ends(config.state_dir, [*waiting][-1]) if told - started > _LONG_S else ""
            tell(waits_for() or f"starting {', '.join(waiting)}: {told - started:.0f} s{progress}{said}")
        if time.monotonic() > deadline:
            said = log_ends(config.state_dir, [*waiting][-1])
            raise DeadlineExceeded(f"{', '.join(waiting)} did not serve within {deadline - started:.0f} s{said}")
        time.sleep(_POLL_S)
        has_waited = True
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
    """State of a starting node once the coordinator has determined its phase; a running node may be between phases.

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


def check_node_installed() -> None:
    """Raises NotInstalled naming the extras to install, without importing a package."""
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if missing:
        extras = dict.fromkeys(_EXTRAS[name] for name in missing)
        text = f"a node needs {', '.join(missing)}: {install_extras(*extras)}"
        raise NotInstalled(text, packages=",".join(missing), extras=",".join(extras))


def check_place(config: NodeConfig) -> None:
    """Checks a node about to start. Does nothing without a fleet.

    Raises InvalidArgument naming the key, and NodeRunning if the leader's port is in use.
    """
    if config.fleet is None:
        return
    interface, leader = config.fleet.interface, config.fleet.leader
    if interface is not None and interface not in (usable := interfaces_with_address()):
        problem = f'"{interface}" has no address on this machine; {", ".join(usable)} have one'
        raise InvalidArgument("fleet.interface", problem)
    if config.fleet.node_rank == 0:
        host, port = split_host_port(fleet_port(config).target)
        try:
            bind_once(host, port)
        except OSError as error:
            advice = (
                f"choose another port (--leader, MASTER_PORT) on all nodes; `ss -ltnp sport = :{port}` shows who listens there"
            )
            problem = f"node 0 cannot serve on {host}:{port}: {error.strerror}; {advice}"
            raise NodeRunning(f"fleet.leader: {problem}", address=leader) from error
    elif problem := fleet_port_problem(config):
        key, text = problem
        raise InvalidArgument(key, f"{key} {text}")
    _check_output(config, node=config)


def check_run(config: NodeConfig) -> None:
    """Checks a run on the node of `config`, which may already be running. Raises InvalidArgument on a node that does not lead its fleet,
    and for an output folder in which the fleet may not write."""
    client_target(config)
    _check_output(config, node=running_settings(config) or config)


def _check_output(config: NodeConfig, *, node: NodeConfig) -> None:
    """A fleet saves through the nodes' ports, which write below `paths.write` only."""
    if node.fleet is None or node.listen == UNIX:
        return
    paths = ClientPaths.of(node)
    for name, table in (("train", config.train), ("sft", config.sft)):
        if table is None:
            continue
        try:
            paths.check(str(table.output_dir / "checkpoints"), use=PathUse.WRITE)
        except (InvalidArgument, PermissionDenied) as error:
            advice = "choose another, or restart all nodes with it in paths.write"
            raise InvalidArgument(f"{name}.output_dir", f"{error.message}; {advice}") from error
