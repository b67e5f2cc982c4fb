"""The leader's checks on a node that joins its fleet. Pure: no I/O."""

from collections.abc import Callable, Collection, Mapping, Sequence

from tasuki.config.schema import FleetConfig
from tasuki.v1.fleet_pb2 import FleetNode, JoinRequest
from tasuki.wire.address import is_beyond_loopback, reachable, split_host_port
from tasuki.wire.errors import FleetMismatch, InvalidArgument, StaleEpoch

_TARGETS = ("coordinator_target", "trainer_target", "rollout_target")
_NAMED_KEYS = 5
Resolve = Callable[[str], Collection[str]]
"""Resolves a host name to addresses; returns none for an unknown name."""
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
"""gRPC's name for a caller on the leader's machine."""
_ADVICE = {
    "version": "install the same tasuki on all nodes",
    "packages": "install the same packages on all nodes",
    "num_ranks": "give all nodes the same trainer.num_ranks",
    "num_gpus": "use nodes with the same number of GPUs",
    "config_digest": "start all nodes from the same configuration",
    "model_digest": "give all nodes the same model folder",
}
_DIGESTS = {"config_digest": "configuration", "model_digest": "model"}
"""Names of fields that are digests, for messages; the digests themselves are in the metadata."""


def check_member(request: JoinRequest, leader: FleetNode, *, config: FleetConfig) -> None:
    """Refuses a node that does not match the leader: StaleEpoch for another attempt, else FleetMismatch naming the first field."""
    node, rank = request.node, request.node.node_rank
    if request.name == config.name and request.attempt != config.attempt:
        whose = "the node" if request.attempt < config.attempt else "the leader"
        raise StaleEpoch(
            f"node {rank} belongs to attempt {request.attempt} of the job and the leader to {config.attempt}; stop {whose}, "
            "which belongs to an earlier attempt",
            epoch=request.attempt,
            current_epoch=config.attempt,
        )
    package = next(iter(_differing(leader.packages, node.packages)), "")
    of_leader = f"{package} {leader.packages.get(package, 'none')}"
    pairs: dict[str, tuple[object, object]] = {
        "name": (config.name, request.name),
        "num_nodes": (config.num_nodes, request.num_nodes),
        "node_rank": (rank if rank < config.num_nodes else f"below {config.num_nodes}", rank),
        "version": (leader.version, node.version),
        "packages": (of_leader, f"{package} {node.packages.get(package, 'none')}"),
        **{
            name: (getattr(leader, name), getattr(node, name))
            for name in ("num_ranks", "num_gpus", "config_digest", "model_digest")
        },
    }
    for field, (expected, found) in pairs.items():
        if expected != found:
            problem = f"has {found}, the fleet has {expected}"
            keys = _differing(leader.config_keys, node.config_keys)
            if field == "config_digest" and keys:
                more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
                problem = f"differs from the leader in {', '.join(keys[:_NAMED_KEYS])}{more}"
            elif field in _DIGESTS:
                problem = f"has a different {_DIGESTS[field]} from the leader"
            advice = _ADVICE.get(field, "start all nodes with the same [fleet]")
            text = f"{field}: node {rank} {problem}; {advice}"
            raise FleetMismatch(text, field=field, node_rank=rank, expected=expected, found=found)


def check_rank(node: FleetNode, holder: FleetNode | None) -> None:
    """Refuses a rank held by another start of a node. Raises FleetMismatch."""
    if holder is not None and holder.boot_id != node.boot_id:
        raise FleetMismatch(
            f"node_rank: {node.node_rank} belongs to the node at {holder.coordinator_target}; give each node its own rank, and "
            "restart the job if a node was restarted",
            field="node_rank",
            node_rank=node.node_rank,
            expected=holder.boot_id,
            found=node.boot_id,
        )


def callable_node(
    node: FleetNode, *, peer: str, certified: Sequence[str] = (), resolve: Resolve = lambda _: frozenset()
) -> FleetNode:
    """The node with targets that the leader can call.

    peer: gRPC's name for the caller. certified: names and addresses in the node's certificate; none without TLS. Raises InvalidArgument.
    """
    hosts = None
    if certified and not peer.startswith("unix:"):
        # Names in the certificate for the host at `peer`; its address comes first.
        address = split_host_port(_host_port(peer))[0]
        named = [f"{node.host}{name[1:]}" if name.startswith("*.") else name for name in certified if "/" not in name]
        own = (name for name in named if name == address or address in resolve(name))
        hosts = sorted(own, key=lambda name: name != address)
    found = FleetNode()
    found.CopyFrom(node)
    for field in _TARGETS:
        setattr(found, field, _callable_target(field, getattr(node, field), peer=peer, hosts=hosts))
    return found


def _differing(leader: Mapping[str, str], node: Mapping[str, str]) -> list[str]:
    """Keys whose values differ, or that only one of the two has."""
    return sorted(key for key in {*leader, *node} if leader.get(key) != node.get(key))


def _callable_target(field: str, target: str, *, peer: str, hosts: Sequence[str] | None) -> str:
    """hosts: names of the caller accepted by TLS; None without TLS."""
    is_local = peer.startswith(_LOCAL)
    if target.startswith("unix:"):
        if not is_local:
            raise InvalidArgument(field, f"{target} is not an address for another machine: set listen to HOST:PORT")
        return target
    try:
        split_host_port(target)
    except ValueError as error:
        raise InvalidArgument(field, str(error)) from error
    found = reachable(target, seen_from=_host_port(peer))
    if found != target and hosts is not None:
        if not hosts:
            raise InvalidArgument(
                field,
                f"the node's certificate names neither {found} nor a host name of it: `tasuki certs --host` with the name that the leader "
                f"resolves, or set listen to HOST:PORT",
            )
        found = f"{hosts[0]}:{split_host_port(target)[1]}"
    if not is_local and not is_beyond_loopback(found):
        raise InvalidArgument(field, f"{target} is loopback, which the leader cannot call: set listen to HOST:PORT")
    return found


def _host_port(peer: str) -> str:
    """ "10.0.0.2:4711" of gRPC's "ipv4:10.0.0.2:4711"."""
    return peer if peer.startswith("unix:") else peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
