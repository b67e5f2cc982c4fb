"""Checks a node's place in its fleet before anything starts, since the fleet would refuse it only minutes later."""

from tasuki.config.checks import fleet_port_problem
from tasuki.config.paths import client_target
from tasuki.config.schema import NodeConfig
from tasuki.config.table import UNIX
from tasuki.node.node_settings import running_settings
from tasuki.rpc.access import ClientPaths
from tasuki.rpc.methods import PathUse
from tasuki.rpc.port import fleet_port
from tasuki.wire.address import bind_once, interfaces_with_address, split_host_port
from tasuki.wire.errors import InvalidArgument, NodeRunning, PermissionDenied


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
