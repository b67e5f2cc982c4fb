"""Until when the certificate of a node's ports is good, and for which names."""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any

from tasuki.cli.doctor.finding import Finding, fail, ok, warn

_NAME = "certificate"
_SOON_S = 14 * 86400
_RENEW = "put a new one for servers in its place, such as by `tasuki certs`; a node that runs takes it up"


def check_certificate(cert: Path, key: Path, *, now: float | None = None) -> Finding:
    """Of a pair that can be used together. now: seconds since 1970."""
    try:
        shown = _shown_by(cert, key)
    except ssl.SSLCertVerificationError as error:
        return fail(_NAME, f"{cert}: {error.verify_message}", _RENEW)
    names = ", ".join(name for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    until = ssl.cert_time_to_seconds(shown["notAfter"])
    found = f"until {time.strftime('%Y-%m-%d', time.gmtime(until))} for {names or 'no name'}"
    if until - (time.time() if now is None else now) < _SOON_S:
        return warn(_NAME, found, _RENEW)
    return ok(_NAME, found)


def _shown_by(cert: Path, key: Path) -> dict[str, Any]:
    """What a client that trusts exactly this certificate reads of it. Raises SSLCertVerificationError for one whose time is over."""
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(cert, key)
    asking.check_hostname = False  # whatever its names are
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
            _answer(server)


def _answer(server: ssl.SSLObject) -> None:
    try:
        server.do_handshake()
    except ssl.SSLWantReadError:
        return
