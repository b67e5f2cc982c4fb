"""Ports of a node: their addresses and the security they require."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from tasuki.wire.address import is_beyond_loopback, is_same_port, split_host_port

if TYPE_CHECKING:
    from tasuki.config.schema import NodeConfig

UNIX = "unix"
_PORTS = {"coordinator": 50050, "trainer": 50051, "rollout": 50052}
"""Ports used in the documentation's examples."""


def check_listen(listen: str) -> str:
    """Raises ValueError for anything but "unix" or an address."""
    if listen != UNIX:
        try:
            split_host_port(listen)
        except ValueError as error:
            raise ValueError(f'must be "{UNIX}", or {str(error).removeprefix("must be ")}') from error
    return listen


def port_targets(config: NodeConfig) -> dict[str, str]:
    """Addresses of services that also listen on a port, by name."""
    listens = {
        "coordinator": config.coordinator.listen,
        "trainer": config.trainer.listen,
        "rollout": config.rollout.listen,
    }
    return {name: listen for name, listen in listens.items() if listen != UNIX}


def fleet_port_problem(config: NodeConfig) -> tuple[str, str] | None:
    """The first service that a fleet's leader on another machine could not call, as a key and what to set; else None."""
    fleet = config.fleet
    if fleet is None or fleet.num_nodes == 1 or not is_beyond_loopback(fleet.leader):
        return None
    listens = {name: getattr(config, name).listen for name in ("coordinator", "trainer", "rollout")}
    for service, listen in listens.items():
        if listen == UNIX or not is_beyond_loopback(listen):
            advice = f'set it to HOST:PORT, such as "0.0.0.0:{_PORTS[service]}", with [security]'
            return f"{service}.listen", f'= "{listen}" cannot be called from node 0, at {fleet.leader}: {advice}'
    return None


def shared_port_problem(config: NodeConfig) -> tuple[str, str] | None:
    """The first key whose address an earlier one already takes, and its problem; else None."""
    listens = {f"{service}.listen": target for service, target in port_targets(config).items()}
    if config.metrics.listen is not None:
        listens["metrics.listen"] = config.metrics.listen
    for (key, listen), (other, taken) in combinations(listens.items(), 2):
        if is_same_port(listen, taken):
            return other, f'= "{taken}" is already taken by {key} = "{listen}": choose another port'
    return None


def port_problem(config: NodeConfig) -> tuple[str, str] | None:
    """The key to change first and its problem; None if every port authenticates its callers."""
    security, tokens = config.security, config.security.tokens.files
    if (security.cert is None) is not (security.key is None):
        given, missing = ("key", "cert") if security.cert is None else ("cert", "key")
        return f"security.{missing}", f"is needed with security.{given}"
    if security.client_ca is not None and security.cert is None:
        return "security.cert", "is needed with security.client_ca"
    if security.client_ca is not None and tokens:
        return "security.tokens", "are for ports without security.client_ca: a caller shows a certificate or a token, not both"
    if security.roles is not None and security.client_ca is None:
        return "security.roles", "names certificates, which security.client_ca asks for; set that, too"
    knows_callers = security.client_ca is not None or bool(tokens)
    if security.insecure and knows_callers:
        return "security.insecure", "disables authentication; remove it with security.client_ca or security.tokens"
    for service, target in port_targets(config).items():
        key = f"{service}.listen"
        if is_beyond_loopback(target) and security.cert is None:
            return (
                key,
                f"= {target} is not loopback: set security.cert and security.key (`tasuki certs` makes them), or {_LOOPBACK_ADVICE}",
            )
        if is_beyond_loopback(target) and not knows_callers:
            return key, f"= {target} is not loopback: set security.client_ca or security.tokens, or {_LOOPBACK_ADVICE}"
        if not knows_callers and not security.insecure:
            return key, (
                f"= {target} is open to every user of the machine: set security.tokens or security.client_ca, or security.insecure = true"
            )
    return _metrics_problem(config, knows_callers=knows_callers)


def _metrics_problem(config: NodeConfig, *, knows_callers: bool) -> tuple[str, str] | None:
    """Problem of the metrics endpoint. On loopback every user of the machine may read it."""
    listen = config.metrics.listen
    if listen is None or not is_beyond_loopback(listen):
        return None
    key = "metrics.listen"
    if config.security.cert is None:
        return key, f"= {listen} is not loopback: set security.cert and security.key, or {_LOOPBACK_ADVICE}"
    if not knows_callers:
        return key, f"= {listen} is not loopback: set security.client_ca or security.tokens, or {_LOOPBACK_ADVICE}"
    return None


_LOOPBACK_ADVICE = "listen on 127.0.0.1"
