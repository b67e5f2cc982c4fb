"""Who may read the page's figures: whoever has the URL that was printed, or, beyond loopback, the callers of [security]."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from http.server import BaseHTTPRequestHandler

from tasuki.config.ports import port_problem
from tasuki.config.schema import NodeConfig
from tasuki.rpc.access import Access
from tasuki.rpc.http_port import HttpCaller
from tasuki.rpc.methods import METHODS
from tasuki.wire.address import is_beyond_loopback, is_loopback
from tasuki.wire.errors import InvalidArgument, Unauthenticated

_METHOD = METHODS["/tasuki.v1.CoordinatorService/GetState"]
"""Whoever may call it may look."""
_BEARER = "bearer "
_TOKEN_BYTES = 32


def check_listen(listen: str, config: NodeConfig | None) -> None:
    """Raises InvalidArgument for an address beyond loopback without TLS and known callers."""
    if not is_beyond_loopback(listen):
        return
    problem = f"{listen} is not loopback: "
    if config is None:
        raise InvalidArgument(
            "listen", f"{problem}give --config of a node with [security], or forward a port of 127.0.0.1 by ssh"
        )
    if (found := port_problem(config)) is not None:
        raise InvalidArgument(found[0], found[1])
    security = config.security
    if security.cert is None or (security.client_ca is None and not security.tokens.files):
        raise InvalidArgument(
            "listen",
            f"{problem}set security.cert, security.key, and security.client_ca or security.tokens; `tasuki certs` makes them",
        )


def make_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Guard:
    """Looks at a request before it is answered."""

    def __init__(self, *, token: str | None, access: Access | None, checks_host: bool) -> None:
        """token: of the URL; None asks for none. access: of a port beyond loopback. checks_host: takes only names of this machine."""
        self._token, self._access, self._checks_host = token, access, checks_host

    def takes_host(self, host: str | None) -> bool:
        """Whether the header `Host` may be this server's: a page elsewhere that has its name lead here is refused (DNS rebinding).

        Over TLS the certificate has the name. The port may be another one, that of a tunnel.
        """
        if not self._checks_host:
            return True
        return host is not None and is_loopback(_bare_host(host))

    def check(self, handler: BaseHTTPRequestHandler) -> None:
        """Raises Unauthenticated and PermissionDenied."""
        if self._access is not None:
            self._access.check(_METHOD, HttpCaller(handler))
        if self._token is not None and not hmac.compare_digest(_given(handler).encode(), self._token.encode()):
            raise Unauthenticated("open the URL that `tasuki dashboard` has printed: it has the token of this page")


def _given(handler: BaseHTTPRequestHandler) -> str:
    header = handler.headers.get("Authorization", "")
    return header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""


def _bare_host(header: str) -> str:
    """Without port and brackets."""
    host, _, port = header.rpartition(":") if not header.endswith("]") else (header, "", "")
    name = host if host and port.isdecimal() else header
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare.lower()
