"""Checks a node's port certificate, and the authorities of its callers: expiry and names."""

from __future__ import annotations

import ipaddress
import ssl
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tasuki.config.schema import NodeConfig
from tasuki.doctor.finding import Finding, Verdict, fail, ok, warn
from tasuki.rpc.port import read_certificate

_SOON_S = 14 * 86400
_RENEW = "replace it with a new server certificate, for example from `tasuki certs`; a running node reloads it"
_REPLACE = "put a new authority into security.client_ca and renew all certificates: docs/ports.md, Renewing and revoking"


def check_certificate(cert: Path, key: Path, *, now: float | None = None) -> Finding:
    """Checks a matching certificate and key. now: Unix time in seconds."""
    name = "certificate"
    try:
        shown = read_certificate(cert, key)
    except ssl.SSLCertVerificationError as error:
        return fail(name, f"{cert}: {error.verify_message}", _RENEW)
    names = ", ".join(_written(kind, host) for kind, host in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    until = ssl.cert_time_to_seconds(shown["notAfter"])
    found = f"until {_day(until)} for {names or 'no name'}"
    return warn(name, found, _RENEW) if until - (time.time() if now is None else now) < _SOON_S else ok(name, found)


def check_authorities(client_ca: Path, *, now: float | None = None) -> Finding:
    """Checks a readable `security.client_ca`: a caller whose authority has expired is refused. now: Unix time in seconds."""
    name, moment = "callers' authority", time.time() if now is None else now
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(client_ca)
    ends = sorted(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs())
    num_expired = sum(end <= moment for end in ends)
    if num_expired == len(ends):
        return fail(name, f"{client_ca}: {num_expired} of {len(ends)} expired", _REPLACE)
    found = f"{client_ca}: {num_expired} of {len(ends)} expired" if num_expired else f"until {_day(ends[0])}"
    return warn(name, found, _REPLACE) if ends[0] - moment < _SOON_S else ok(name, found)


def _day(end: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(end))


def _written(kind: str, name: str) -> str:
    """A name as `tasuki certs --host` takes it; OpenSSL writes ::1 as 0:0:0:0:0:0:0:1."""
    return name if kind == "DNS" else str(ipaddress.ip_address(name.strip()))


def certificate_findings(config: NodeConfig) -> Iterable[Finding]:
    """Checks TLS files; none without TLS. Call after `check_ports`."""
    security = config.security
    if security.cert is not None and security.key is not None:
        yield check_certificate(security.cert, security.key)
    if security.client_ca is not None:
        yield check_authorities(security.client_ca)


def warn_of_certificate(config: NodeConfig) -> None:
    """Writes a line to stderr for each certificate that has expired or soon will. The node runs without its ports, by its sockets."""
    for finding in certificate_findings(config):
        if finding.verdict is not Verdict.OK:
            sys.stderr.write(f"tasuki: {finding.verdict} {finding.name}: {finding.found}; {finding.advice}\n")
