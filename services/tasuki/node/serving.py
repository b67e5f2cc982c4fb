"""Waits for a node's services to serve, and asks its coordinator for the state."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.node.exit_report import node_down
from tasuki.node.post_mortem import why_it_ended
from tasuki.node.services import ServiceCommand, node_services
from tasuki.rpc.start_seconds import read_start_seconds, serves_line
from tasuki.v1 import coordinator_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, from_rpc_error

_POLL_S = 0.1
CALL_TIMEOUT_S = 2.0
# In addition to the engine's start, since the trainer may load its model only once the engine sleeps.
_START_MARGIN_S = 300.0
_TELL_EVERY_S = 15.0
Tell = Callable[[str], None]
WaitsFor = Callable[[], str]
"""A line naming what a node waits for besides this machine, or an empty string."""


def wait_until_serving(
    config: NodeConfig, *, tell: Tell, supervisor: subprocess.Popen[bytes] | None, waits_for: WaitsFor = lambda: ""
) -> None:
    """Waits until all services serve and the coordinator knows the phase, telling of each. supervisor: of a node started here.

    Raises the reason if the node ends, DeadlineExceeded if it takes too long.
    """
    started = told = time.monotonic()
    deadline = started + config.coordinator.stage_timeout_s + _START_MARGIN_S
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


def _is_serving(service: ServiceCommand) -> bool:
    with open_blocking_channel(service.target) as channel:
        request = health_pb2.HealthCheckRequest(service=service.health_name)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
