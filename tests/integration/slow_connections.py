"""Connections that never complete a call."""

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PLAIN = (b"", b"\x16\x03\x01\x02\x00\x01", _PREFACE, os.urandom(50))


@contextmanager
def slow_connections(port: int, ca: Path, *, num: int) -> Iterator[list[socket.socket]]:
    """Opens half-open TLS connections: silent, in the middle of a handshake, with garbage, or with nothing after the handshake."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    opened: list[socket.socket] = []
    try:
        for number in range(num):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            if number % 10 < 8:
                connection.sendall(_PLAIN[number % 4])
            else:
                connection = context.wrap_socket(connection, server_hostname="localhost")
                with suppress(OSError):  # a port that requires a certificate has closed it already
                    connection.sendall(_PREFACE[:10] if number % 10 == 8 else _PREFACE)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()
