"""`tasuki fleet`: runs a node of a fleet under a scheduler, and shows the fleet's state."""

import functools
import json
import re
import signal
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from rich.table import Table

from tasuki.cli.node_view import open_console, phase_name, stage_name
from tasuki.config.load import MAX_CONFIG_BYTES, load_config
from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, holder
from tasuki.config.paths import client_target, fleet_target, log_path
from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import warn_of_certificate
from tasuki.node.exit_report import is_requested, node_down, read_exit_report, why_it_ended
from tasuki.node.node_snapshot import plain
from tasuki.node.processes import to_stderr
from tasuki.node.services import EXIT_FLEET_ENDED
from tasuki.node.start import start_node
from tasuki.rpc.port import peer_credentials
from tasuki.v1 import coordinator_pb2, fleet_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.credentials import authorization
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    InvalidArgument,
    NodeDown,
    NotJoined,
    PeerUnavailable,
    TasukiError,
    from_rpc_error,
)
from tasuki.wire.printable import printable
from tasuki.wire.regular_file import read_regular

INTERRUPTED = 130
UP = "tasuki fleet up CONFIG"
_READ_TIMEOUT_S = 5.0
_JOINED_TIMEOUT_S = 2.0
_TICK_S = 0.2


def fleet_config(
    path: Path, *, overrides: Sequence[str], flags: Mapping[str, Any], environment: Mapping[str, str]
) -> NodeConfig:
    """Fills in [fleet]: from `flags` that are not None, else from `--set` and the file, else from the environment.

    Raises InvalidArgument naming a key that none of them sets.
    """
    try:
        text = read_regular(path, max_bytes=MAX_CONFIG_BYTES).decode().removeprefix("\ufeff")
        own = tomllib.loads(text).get("fleet")
    except (OSError, ValueError, RecursionError):  # load_config says more about it
        own = None
    own = own if isinstance(own, dict) else {}
    told = {key: value for key, value in fleet_table(environment).items() if key not in own}
    given = {key: value for key, value in flags.items() if value is not None}
    sets, last = ([f"fleet.{key}={json.dumps(value)}" for key, value in table.items()] for table in (told, given))
    missing = "fleet.name"
    try:
        config = load_config(path, overrides=[*sets, *overrides, *last])
        if config.fleet is not None:
            return config
    except InvalidArgument as error:
        missing = error.metadata["field"]
        if not missing.startswith("fleet.") or "required" not in error.message:
            raise
    flag = f"--{missing.removeprefix('fleet.').replace('_', '-')}"
    raise InvalidArgument(missing, f"is not set: give {flag}, or run under Slurm, a JobSet or torchrun's variables")


def up(config: NodeConfig, *, grace_s: float) -> int:
    """Starts the node, joins the fleet, and stays until fleet or node end or a signal arrives.

    grace_s: how long the node continues after SIGTERM, so that a run can save; on node 0 at most until the run is done.
    Returns EXIT_FLEET_ENDED if the fleet has ended or the node was killed, 130 after a signal, 0 after `tasuki down`. Otherwise raises
    why the node ended.
    """
    assert config.fleet is not None
    fleet = config.fleet
    to_stderr(
        f"node {fleet.node_rank} of {fleet.num_nodes} in fleet {fleet.name!r}, attempt {fleet.attempt}, led at {fleet.leader}"
    )
    try:
        node = start_node(config, waits_for=functools.partial(missing_nodes, config))
    except TasukiError as error:
        return _code_of_loss(error, config)
    warn_of_certificate(config)
    asked = _StopSignal(config, grace_s=grace_s)
    try:
        while node.process.poll() is None:
            if asked.is_over():
                return INTERRUPTED
            time.sleep(_TICK_S)
        return 0 if node.wait() == 0 else _code_of_loss(why_it_ended(config), config)
    finally:
        node.stop()


def missing_nodes(config: NodeConfig) -> str:
    """A line that names the nodes that have not joined; empty if all have."""
    fleet = config.fleet
    assert fleet is not None
    credentials = None if fleet.node_rank == 0 else peer_credentials(config.security)
    target = fleet_target(config) if fleet.node_rank == 0 else fleet.leader
    with open_blocking_channel(target, credentials=credentials) as channel:
        stub = FleetServiceStub(channel)
        try:
            seen = stub.GetFleet(fleet_pb2.GetFleetRequest(), timeout=_JOINED_TIMEOUT_S, metadata=authorization(credentials))
        except grpc.RpcError:
            return f"waiting for node 0, which does not answer at {fleet.leader}"
    here = {member.node.node_rank for member in seen.members}
    missing = [str(rank) for rank in range(seen.num_nodes) if rank not in here]
    if not missing:
        return ""
    return f"waiting for node{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {seen.num_nodes} to join"


def _code_of_loss(error: TasukiError, config: NodeConfig) -> int:
    """EXIT_FLEET_ENDED if another attempt may succeed: the fleet has ended, no leader came, the trainer did not reach another node's, or
    the node's processes were killed.

    Returns 0 after `tasuki down` during the start. Raises any other error.
    """
    # The trainer of a node that stays may hear of a lost one before the fleet does.
    is_of_peers = isinstance(error, PeerUnavailable | DeadlineExceeded) and error.metadata.get("service") == "trainer"
    if not (isinstance(error, FleetEnded | NotJoined | NodeDown) or is_of_peers):
        raise error
    to_stderr(f"tasuki: error {error.reason}: {error.message}")
    is_asked_for = isinstance(error, NodeDown) and is_requested(read_exit_report(config.state_dir))
    return 0 if is_asked_for else EXIT_FLEET_ENDED


class _StopSignal:
    def __init__(self, config: NodeConfig, *, grace_s: float) -> None:
        assert config.fleet is not None
        self._config, self._grace_s, self._leads = config, grace_s, config.fleet.node_rank == 0
        self._ends: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._asked())

    def _asked(self) -> None:
        now = time.monotonic()
        self._ends = now if self._ends is not None else now + self._grace_s

    def is_over(self) -> bool:
        """Whether the node must end now. Only the leader can see whether a run is in progress."""
        if self._ends is None:
            return False
        has_run = not self._leads or holder(self._config.state_dir, name=TRAINING_LOCK) is not None
        return time.monotonic() >= self._ends or not has_run


def show_state(config: NodeConfig, *, as_json: bool, must_serve: bool) -> int:
    """Prints the fleet's state, on node 0. Raises NodeDown if no node runs there.

    must_serve: return 1 while nodes are missing or the fleet is in no phase.
    """
    try:
        with open_blocking_channel(client_target(config)) as channel:
            request = fleet_pb2.GetFleetRequest()
            fleet: fleet_pb2.GetFleetResponse = FleetServiceStub(channel).GetFleet(request, timeout=_READ_TIMEOUT_S)
            stub = CoordinatorServiceStub(channel)
            state = stub.GetState(coordinator_pb2.GetStateRequest(), timeout=_READ_TIMEOUT_S).state
    except grpc.RpcError as error:
        known = from_rpc_error(error)
        if type(known) is PeerUnavailable:
            if holder(config.state_dir, name=NODE_LOCK) is None:
                raise node_down(config.state_dir, start=UP) from error
            text = f"the node is running, but its fleet service does not answer yet; see {log_path(config.state_dir, 'fleet')}"
            known = PeerUnavailable(text, peer="fleet")
        raise known from error
    if as_json:
        shown = {"fleet": plain(fleet), "state": plain(state)}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        _draw(fleet, state)
    is_whole = len(fleet.members) == fleet.num_nodes and not fleet.ended_by and state.phase != types_pb2.PHASE_UNSPECIFIED
    return 1 if must_serve and not is_whole else 0


def _draw(fleet: fleet_pb2.GetFleetResponse, state: coordinator_pb2.NodeState) -> None:
    table = Table("rank", "coordinator", "GPUs", "tasuki", "silent", box=None, header_style="bold")
    for member in fleet.members:
        node = member.node
        cells = (node.node_rank, node.coordinator_target, node.num_gpus, node.version, f"{member.silent_s:.1f} s")
        table.add_row(*map(str, cells))
    console = open_console()
    console.print(
        f"fleet {fleet.name!r}, attempt {fleet.attempt}, epoch {fleet.epoch}: {len(fleet.members)} of {fleet.num_nodes} nodes, "
        f"{phase_name(state.phase)}, last stage {stage_name(state.stage) if state.stage else 'unknown'}",
        highlight=False,
        soft_wrap=True,
    )
    if fleet.ended_by or state.last_error:
        console.print(printable(f"error: {fleet.ended_by or state.last_error}"), highlight=False, markup=False, soft_wrap=True)
    console.print(table)


DEFAULT_PORT = 29400
"""Default port of the leader."""
_NUM_NODES = ("NNODES", "PET_NNODES", "SLURM_NNODES")
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_HOST = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_ATTEMPT = ("TASUKI_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_NAME = ("TASUKI_FLEET", "SLURM_JOB_ID", "JOBSET_NAME", "TORCHELASTIC_RUN_ID")


def fleet_table(environment: Mapping[str, str]) -> dict[str, Any]:
    """Keys of [fleet] found in the environment; empty outside a job. The first in the table of docs/guides/several-nodes.md wins.

    Raises InvalidArgument naming a variable that is not a number or a list of hosts.
    """
    found = {
        "num_nodes": _number(environment, _NUM_NODES),
        "node_rank": _number(environment, _NODE_RANK),
        "attempt": _number(environment, _ATTEMPT),
        "name": _first(environment, _NAME),
        "leader": _leader(environment),
    }
    return {key: value for key, value in found.items() if value is not None}


def _leader(environment: Mapping[str, str]) -> str | None:
    host = _first(environment, _HOST)
    if host is None and (hosts := environment.get("SLURM_JOB_NODELIST")):
        host = first_host(hosts)
    if host is None:
        return None
    port = _number(environment, _PORT)
    return f"{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if port is None else port}"


def first_host(hosts: str) -> str:
    """First host of a Slurm list, such as "gpu-003" of "gpu-[003-010,012],login1". Raises InvalidArgument."""
    found = re.match(r"([^\s,\[\]]+)(?:\[(\d+)[^\]]*\]([^\s,\[\]]*))?(?=,|$)", hosts)
    if found is None:
        raise InvalidArgument("SLURM_JOB_NODELIST", f"{hosts!r} is not a list of hosts; set MASTER_ADDR to the first one")
    return "".join(part or "" for part in found.groups())


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return None
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(name, f"is {text!r} in the environment; it must be a whole number, 0 or more")
    return int(text)
