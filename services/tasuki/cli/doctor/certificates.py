"""Checks the expiry and names of a node's port certificate."""

from __future__ import annotations

import ipaddress
import ssl
import sys
import time
from pathlib import Path

from tasuki.cli.doctor.finding import Finding, Verdict, fail, ok, warn
from tasuki.cli.served_certificate import read_certificate
from tasuki.config.schema import NodeConfig

_NAME = "certificate"
_SOON_S = 14 * 86400
_RENEW = "replace it with a new server certificate, for example from `tasuki certs`; a running node reloads it"


def check_certificate(cert: Path, key: Path, *, now: float | None = None) -> Finding:
    """Checks a matching certificate and key. now: Unix time in seconds."""
    try:
        shown = read_certificate(cert, key)
    except ssl.SSLCertVerificationError as error:
        return fail(_NAME, f"{cert}: {error.verify_message}", _RENEW)
    names = ", ".join(_written(kind, name) for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    until = ssl.cert_time_to_seconds(shown["notAfter"])
    found = f"until {time.strftime('%Y-%m-%d', time.gmtime(until))} for {names or 'no name'}"
    if until - (time.time() if now is None else now) < _SOON_S:
        return warn(_NAME, found, _RENEW)
    return ok(_NAME, found)


def _written(kind: str, name: str) -> str:
    """A name as `tasuki certs --host` takes it; OpenSSL writes ::1 as 0:0:0:0:0:0:0:1."""
    return name if kind == "DNS" else str(ipaddress.ip_address(name.strip()))


def warn_of_certificate(config: NodeConfig) -> None:
    """Writes a line to stderr if the certificate of the node's ports has expired or soon will. The node runs without it, by its sockets."""
    security = config.security
    if security.cert is None or security.key is None:
        return
    finding = check_certificate(security.cert, security.key)
    if finding.verdict is not Verdict.OK:
        sys.stderr.write(f"tasuki: {finding.verdict} {finding.name}: {finding.found}; {finding.advice}\n")
