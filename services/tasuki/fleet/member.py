"""A node that joins a fleet, and the leader's checks on it. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tasuki.config.fleet_schema import FleetConfig
from tasuki.v1 import fleet_pb2
from tasuki.wire.address import is_beyond_loopback, reachable, split_host_port
from tasuki.wire.errors import FleetMismatch, InvalidArgument, StaleEpoch

_TARGETS = ("coordinator_target", "trainer_target", "rollout_target")
_NAMED_KEYS = 5
Resolve = Callable[[str], Collection[str]]
"""Resolves a host name to addresses; returns none for an unknown name."""
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
"""gRPC's name for a caller on the leader's machine."""


@dataclass(frozen=True, slots=True)
class Member:
    """One start of a node. digests: SHA-256 in hex; num_gpus: 0 on a CPU; targets: gRPC targets as seen by the leader.

    config_keys: digests by key of the parts of `config_digest`. packages: versions by name.
    """

    node_rank: int
    boot_id: str
    coordinator_target: str
    trainer_target: str
    rollout_target: str
    version: str
    config_digest: str
    num_ranks: int
    num_gpus: int
    model_digest: str
    config_keys: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)

    def to_proto(self) -> fleet_pb2.FleetNode:
        return fleet_pb2.FleetNode(**{name: getattr(self, name) for name in self.__slots__})


def member_from_proto(
    node: fleet_pb2.FleetNode, *, peer: str, certified: Sequence[str] = (), resolve: Resolve = lambda _: frozenset()
) -> Member:
    """peer: gRPC's name for the caller. certified: names and addresses in the node's certificate; None without TLS.

    Raises InvalidArgument for a target that the leader cannot call.
    """
    hosts = None if not certified or peer.startswith("unix:") else _hosts(node, certified, peer, resolve)
    targets = {name: _callable_target(name, getattr(node, name), peer=peer, hosts=hosts) for name in _TARGETS}
    return Member(
        node_rank=node.node_rank,
        boot_id=node.boot_id,
        version=node.version,
        config_digest=node.config_digest,
        num_ranks=node.num_ranks,
        num_gpus=node.num_gpus,
        model_digest=node.model_digest,
        config_keys=dict(node.config_keys),
        host=node.host,
        packages=dict(node.packages),
        **targets,
    )


def check_member(member: Member, leader: Member, *, config: FleetConfig, num_nodes: int, name: str, attempt: int) -> None:
    """Refuses a node that does not match the leader: StaleEpoch for another attempt, else FleetMismatch naming the first field.

    num_nodes, name, attempt: as sent by the node.
    """
    _require("name", config.name, name, member)
    if attempt != config.attempt:
        whose = "the node" if attempt < config.attempt else "the leader"
        raise StaleEpoch(
            f"node {member.node_rank} belongs to attempt {attempt} of the job and the leader to {config.attempt}; stop {whose}, "
            "which belongs to an earlier attempt",
            epoch=attempt,
            current_epoch=config.attempt,
        )
    _require("num_nodes", config.num_nodes, num_nodes, member)
    if member.node_rank >= config.num_nodes:
        raise _mismatch("node_rank", f"below {config.num_nodes}", member.node_rank, member)
    keys = _other_keys(leader.config_keys, member.config_keys)
    _require("version", leader.version, member.version, member)
    for package in _other_keys(leader.packages, member.packages):
        here, there = leader.packages.get(package, "none"), member.packages.get(package, "none")
        raise _mismatch("packages", f"{package} {here}", f"{package} {there}", member)
    for alike in ("num_ranks", "num_gpus", "config_digest", "model_digest"):
        _require(alike, getattr(leader, alike), getattr(member, alike), member, keys=keys)


def check_rank(member: Member, holder: Member | None) -> None:
    """Refuses a rank held by another start of a node. Raises FleetMismatch."""
    if holder is not None and holder.boot_id != member.boot_id:
        raise FleetMismatch(
            f"node_rank: {member.node_rank} belongs to the node at {holder.coordinator_target}; give each node its own rank, and "
            "restart the job if a node was restarted",
            field="node_rank",
            node_rank=member.node_rank,
            expected=holder.boot_id,
            found=member.boot_id,
        )


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


def _require(field: str, expected: object, found: object, member: Member, *, keys: Sequence[str] = ()) -> None:
    if expected != found:
        raise _mismatch(field, expected, found, member, keys=keys if field == "config_digest" else ())


def _mismatch(field: str, expected: object, found: object, member: Member, *, keys: Sequence[str] = ()) -> FleetMismatch:
    advice = _ADVICE.get(field, "start all nodes with the same [fleet]")
    problem = f"has {found}, the fleet has {expected}"
    if keys:
        more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
        problem = f"differs from the leader in {', '.join(keys[:_NAMED_KEYS])}{more}"
    elif field in _DIGESTS:
        problem = f"has a different {_DIGESTS[field]} from the leader"
    text = f"{field}: node {member.node_rank} {problem}; {advice}"
    return FleetMismatch(text, field=field, node_rank=member.node_rank, expected=expected, found=found)


def _other_keys(leader: Mapping[str, str], member: Mapping[str, str]) -> list[str]:
    """Keys whose values differ, or that only one of the two has."""
    return sorted(key for key in {*leader, *member} if leader.get(key) != member.get(key))


def _hosts(node: fleet_pb2.FleetNode, certified: Sequence[str], peer: str, resolve: Resolve) -> list[str]:
    """Names in the node's certificate for the host at `peer`; its address comes first."""
    address = split_host_port(_host_port(peer))[0]
    named = [f"{node.host}{name[1:]}" if name.startswith("*.") else name for name in certified if "/" not in name]
    return sorted((name for name in named if name == address or address in resolve(name)), key=lambda name: name != address)


def _callable_target(field: str, target: str, *, peer: str, hosts: Sequence[str] | None) -> str:
    """hosts: names of the caller accepted by TLS; None without TLS."""
    is_local = peer.startswith(_LOCAL)
    if target.startswith("unix:"):
        if not is_local:
            raise InvalidArgument(
                field, f"{target} is not an address for another machine: set {_service(field)}.listen to HOST:PORT"
            )
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
                f"resolves, or set {_service(field)}.listen to HOST:PORT",
            )
        found = f"{hosts[0]}:{split_host_port(target)[1]}"
    if not is_local and not is_beyond_loopback(found):
        raise InvalidArgument(
            field, f"{target} is loopback, which the leader cannot call: set {_service(field)}.listen to HOST:PORT"
        )
    return found


def _service(field: str) -> str:
    return field.removesuffix("_target")


def _host_port(peer: str) -> str:
    """ "10.0.0.2:4711" of gRPC's "ipv4:10.0.0.2:4711"."""
    if peer.startswith("unix:"):
        return peer
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
