"""Credentials of a node at the ports of other nodes of its fleet."""

from __future__ import annotations

from tasuki.config.security_schema import SecurityConfig
from tasuki.wire.credentials import Credentials
from tasuki.wire.errors import InvalidArgument


def peer_credentials(security: SecurityConfig) -> Credentials | None:
    """The node's own certificate, or the first token of role peer; None if ports on loopback admit every caller.

    `client_ca` has to have signed the nodes' certificates, too. Raises InvalidArgument for TLS without it.
    """
    if security.client_ca is not None:
        return Credentials(ca=security.client_ca, cert=security.cert, key=security.key)
    if security.cert is not None:
        raise InvalidArgument("security.client_ca", "is needed by a fleet with TLS: nodes show each other their certificates")
    return None if security.tokens.peer is None else Credentials(token_file=security.tokens.peer)
