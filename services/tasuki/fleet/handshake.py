"""Detects that a leader rejects this node's certificate, which gRPC does not report."""

from __future__ import annotations

import socket
import ssl
import time

from tasuki.wire.address import split_host_port
from tasuki.wire.credentials import Credentials

_NUM_LOOKS, _PAUSE_S, _TIMEOUT_S = 3, 0.5, 5.0


def is_certificate_refused(target: str, credentials: Credentials | None) -> bool:
    """Whether the server closes every connection silently after a handshake that succeeded on the client's side.

    In TLS 1.3 the client's certificate comes last. On rejection grpc sends no alert; on success it sends HTTP/2 settings. A server that is
    shutting down is also silent, but not several times.
    """
    if credentials is None or credentials.cert is None:
        return False
    for number in range(_NUM_LOOKS):
        if number:
            time.sleep(_PAUSE_S)
        try:
            if _first_byte(target, credentials):
                return False
        except (OSError, ValueError):  # no server, or an error other than a rejected certificate
            return False
    return True


def _first_byte(target: str, credentials: Credentials) -> bytes:
    """First byte from the server; empty if it closes the connection. Raises OSError, including ssl's errors, and ValueError."""
    host, port = split_host_port(target)
    context = ssl.create_default_context(cafile=credentials.ca)
    assert credentials.cert is not None
    context.load_cert_chain(credentials.cert, credentials.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        return secured.recv(1)
