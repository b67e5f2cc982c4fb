"""Result of one check of `tasuki doctor`, and the check of a certificate, which `tasuki up` makes too."""

import ipaddress
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.schema import NodeConfig
from tasuki.rpc.port import read_certificate
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import NotInstalled, TasukiError
from tasuki.wire.extras import install_extras


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A node runs, with the drawback named in `advice`."""
    FAIL = "fail"
    """A node would not start or run."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    """Name of the check."""
    verdict: Verdict
    found: str
    advice: str = ""
    """Action to take; empty if all is well."""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, advice)


def checked(name: str, found: str, check: Callable[[], object], *, key: str) -> Finding:
    """Runs a check of the node's own start. key: to change if its error names none."""
    try:
        with named_if_denied(Path(found)):
            check()
    except NotInstalled as error:
        return fail(name, f"{error.reason}: {error.message}", install_extras(error.metadata["extras"]))
    except TasukiError as error:
        return fail(name, f"{error.reason}: {error.message}", f"change {error.metadata.get('field', key)}")
    return ok(name, found)


def is_running(config: NodeConfig) -> bool:
    """Whether the node is up. False for a state folder that the user may not enter, which another finding reports."""
    try:
        return holder(config.state_dir, name=NODE_LOCK) is not None
    except PermissionError:
        return False


_SOON_S = 14 * 86400
_RENEW = "replace it with a new server certificate, for example from `tasuki certs`; a running node reloads it"


def check_certificate(cert: Path, key: Path, *, now: float | None = None) -> Finding:
    """Checks a matching certificate and key. now: Unix time in seconds."""
    name = "certificate"
    try:
        shown = read_certificate(cert, key)
    except ssl.SSLCertVerificationError as error:
        return fail(name, f"{cert}: {error.verify_message}", _RENEW)
    hosts: list[str] = []
    for kind, host in shown.get("subjectAltName", ()):
        if kind == "DNS":
            hosts.append(host)
        elif kind == "IP Address":  # as `tasuki certs --host` takes it; OpenSSL writes ::1 as 0:0:0:0:0:0:0:1
            hosts.append(str(ipaddress.ip_address(host.strip())))
    names = ", ".join(hosts)
    until = ssl.cert_time_to_seconds(shown["notAfter"])
    found = f"until {time.strftime('%Y-%m-%d', time.gmtime(until))} for {names or 'no name'}"
    return warn(name, found, _RENEW) if until - (time.time() if now is None else now) < _SOON_S else ok(name, found)


def certificate_findings(config: NodeConfig) -> Iterable[Finding]:
    """Checks the certificate; nothing without TLS. Call after `check_ports`."""
    security = config.security
    if security.cert is not None and security.key is not None:
        yield check_certificate(security.cert, security.key)


def warn_of_certificate(config: NodeConfig) -> None:
    """Writes a line to stderr for a certificate that has expired or soon will. The node runs without its ports, by its sockets."""
    for finding in certificate_findings(config):
        if finding.verdict is not Verdict.OK:
            sys.stderr.write(f"tasuki: {finding.verdict} {finding.name}: {finding.found}; {finding.advice}\n")
