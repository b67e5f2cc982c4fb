"""What a node shows at the ports of other nodes of its fleet."""

from __future__ import annotations

from tasuki.config.security_schema import SecurityConfig
from tasuki.wire.credentials import Credentials


def peer_credentials(security: SecurityConfig) -> Credentials | None:
    """The node's own certificate, or the first token of role peer; None where ports on loopback let everybody in."""
    if security.client_ca is not None:
        return Credentials(ca=security.client_ca, cert=security.cert, key=security.key)
    return None if security.tokens.peer is None else Credentials(token_file=security.tokens.peer)
