"""Whether a leader takes this node's certificate, which gRPC does not tell its caller."""

from __future__ import annotations

import socket
import ssl
import time

from tasuki.wire.address import split_host_port
from tasuki.wire.credentials import Credentials

_NUM_LOOKS, _PAUSE_S, _TIMEOUT_S = 3, 0.5, 5.0


def is_certificate_refused(target: str, credentials: Credentials | None) -> bool:
    """Whether the server ends every connection without a word after a handshake that the caller's side has accepted.

    In TLS 1.3 a caller's certificate comes last. grpc sends no alert when it refuses one, and HTTP/2 settings when it takes it. A server
    that is about to end says nothing either, but not several times.
    """
    if credentials is None or credentials.cert is None:
        return False
    for number in range(_NUM_LOOKS):
        if number:
            time.sleep(_PAUSE_S)
        try:
            if _first_byte(target, credentials):
                return False
        except (OSError, ValueError):  # no server, or not its certificate that is wrong
            return False
    return True


def _first_byte(target: str, credentials: Credentials) -> bytes:
    """What the server says first; nothing when it ends the connection. Raises OSError, of which ssl's are, and ValueError."""
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
