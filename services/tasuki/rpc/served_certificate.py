"""The certificate of a node's ports, as a client sees it."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_certificate(cert: Path, key: Path) -> dict[str, Any]:
    """Fields as of `getpeercert`, seen by a client that trusts only this certificate. Names are not checked.

    Raises SSLError; SSLCertVerificationError if it has expired.
    """
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(cert, key)
    asking.check_hostname = False
    asking.load_verify_locations(cert)
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server)
    while True:
        try:
            client.do_handshake()
            return client.getpeercert() or {}
        except ssl.SSLWantReadError:
            with suppress(ssl.SSLWantReadError):
                server.do_handshake()
